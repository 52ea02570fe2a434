"""Measures what Backplane's metrics cost a decode step.

    OMP_NUM_THREADS=1 python benchmarks/metrics.py --processor-time    # on a machine under other load
    python benchmarks/metrics.py                                       # wall-clock time
    python benchmarks/metrics.py --device sim

One engine runs in this process. Three modes take turns, request by request: with metrics (*on*), without (*off*), and
without once more (*control*). *Off* and *control* differ only by chance, so a difference between *on* and *off* counts
only if it is larger. *Alone* is the time of the same code in a loop, around no step. No step of these is sampled. A
sampled step is measured apart; its additional time is divided by the default interval.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

PROMPT, OUTPUT, SKIPPED = 8, 41, 4
"""Prompt and output tokens of a request, and the number of first steps that are not counted."""
MODES = ("off", "on", "control")
KV_CACHE = 256 << 20


class Engine:
    """Runs a model with metrics, and measures the time of each step."""

    def __init__(self, model: str | None, now: Callable[[], float]) -> None:
        from vllm import LLM

        from vllm_backplane.models import FULL_PRECISION, obtain

        self.now = now
        self.llm = LLM(
            model or str(obtain(FULL_PRECISION.name)),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=16,
            kv_cache_memory_bytes=KV_CACHE,
            enable_prefix_caching=False,
            disable_log_stats=False,
            skip_tokenizer_init=True,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.worker, self.scheduler = core.model_executor.driver_worker.worker, core.scheduler
        self.recorder, self.interval = self.worker.recorder, self.worker.recorder._every
        self.recorder._every = 0

    def steps(self, sequences: int, mode: str) -> list[float]:
        """Runs `sequences` requests at once and returns the seconds of each decode step."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        from vllm_backplane.metrics.scheduler import MeasuredScheduler

        plain = super(MeasuredScheduler, self.scheduler)
        if mode in ("off", "control"):
            self.worker.recorder = None
            self.scheduler.schedule, self.scheduler.update_from_output = plain.schedule, plain.update_from_output
        try:
            engine, found = self.llm.llm_engine, []
            parameters = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
            for sequence in range(sequences):
                ids = [100 + (place * 7 + sequence) % 900 for place in range(PROMPT)]
                engine.add_request(str(sequence), TokensPrompt(prompt_token_ids=ids), parameters)
            while engine.has_unfinished_requests():
                began = self.now()
                engine.step()
                found.append(self.now() - began)
            return found[SKIPPED:-1]
        finally:
            self.worker.recorder = self.recorder
            for name in ("schedule", "update_from_output"):
                vars(self.scheduler).pop(name, None)

    def turns(self, sequences: int, rounds: int) -> dict[str, list[float]]:
        """Returns the median step of each round, by mode. The order of the modes changes from round to round."""
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for turn in range(rounds):
            first = turn % len(MODES)
            order = MODES[first:] + MODES[:first]
            for mode in order if turn % 2 else reversed(order):
                found[mode].append(statistics.median(self.steps(sequences, mode)))
        return found

    def alone(self, sequences: int, count: int = 20_000) -> float:
        """Returns the seconds per step of the recorder and of the scheduler's clock, around nothing."""
        tokens, seconds = {str(place): 1 for place in range(sequences)}, self.scheduler.scheduling_time
        began = self.now()
        for _ in range(count):
            seconds.add_since(time.perf_counter())
            with self.recorder.forward(tokens, sequences):
                pass
            with self.recorder.sample():
                pass
            seconds.add_since(time.perf_counter())
            seconds.save()
        return (self.now() - began) / count

    def sampled(self, sequences: int, rounds: int) -> float:
        """Returns the median of steps that are all sampled."""
        self.recorder._every, self.recorder._next_sampled = 1, 0
        try:
            return statistics.median(self.steps(sequences, "on")[-1] for _ in range(rounds))
        finally:
            self.recorder._every = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: smollm2-fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=12, help="of every mode (default: %(default)s, at least 2)")
    parser.add_argument("--processor-time", action="store_true", help="measure the processor time of one thread")
    args = parser.parse_args()
    os.environ.update(
        BACKPLANE_DEVICE=args.device,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the worker and the scheduler are then in this process
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    engine = Engine(args.model, time.thread_time if args.processor_time else time.perf_counter)
    heads = ("sequences", "ms per step: off", "on", "control", "on - off, us (quartiles)", "share", "control - off, us")
    heads += ("alone, us", "sampled")
    print(f"| {' | '.join(heads)} |\n|{' ---: |' * len(heads)}")
    for sequences in args.sequences:
        engine.steps(sequences, "on")
        found = engine.turns(sequences, args.rounds)
        off, on, control = (1e3 * statistics.median(found[mode]) for mode in MODES)
        low, middle, high = quartiles(found, "on")
        sampled = 1e3 * engine.sampled(sequences, args.rounds)
        print(
            f"| {sequences} | {off:.3f} | {on:.3f} | {control:.3f} | {middle:+.1f} ({low:+.1f} to {high:+.1f}) | "
            f"{middle / off / 10:+.2f} % | {quartiles(found, 'control')[1]:+.1f} | "
            f"{1e6 * engine.alone(sequences):.1f} | "
            f"{sampled:.1f} ms, {100 * (sampled / off - 1) / engine.interval:+.2f} % of all steps |",
            flush=True,
        )
    return 0


def quartiles(found: dict[str, list[float]], mode: str) -> list[float]:
    """Returns the quartiles of the difference to the steps of the same round without metrics, in microseconds."""
    return statistics.quantiles([1e6 * (b - a) for a, b in zip(found["off"], found[mode], strict=True)], n=4)


if __name__ == "__main__":
    sys.exit(main())
