"""Measures what the profiling support costs a decode step while no trace is taken.

    python benchmarks/profiling.py                                     # wall-clock time
    OMP_NUM_THREADS=1 python benchmarks/profiling.py --processor-time  # on a machine under other load
    python benchmarks/profiling.py --device sim

One engine with `--profiler-config` runs in this process. Three modes take turns, request by request: the worker's own
methods (*off*), the same methods without the profiling support (*absent*), and *off* once more (*control*). Two rows
show how reliable the others are. *Off* and *control* differ only by chance, so a difference from *absent* counts only
if it is larger. And while a trace is taken, the measurement must show a difference. After the trace the modes are
measured again, to show that the trace has removed its hooks from the modules.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

PROMPT, OUTPUT, SKIPPED = 8, 41, 4
"""Prompt and output tokens of a request, and the number of first steps that are not counted."""
MODES = ("absent", "off", "control")
KV_CACHE = 256 << 20
"""Size of the KV cache in bytes; by default it takes all free memory of a device."""


def without(worker: Any) -> dict[str, Callable[[Any], Any]]:
    """Returns the two worker methods that have profiling support, without it."""
    import torch

    from vllm_backplane.worker.worker import BackplaneWorker

    def execute_model(scheduler_output: Any) -> Any:
        with worker._terminating_on_failure("execute_model"):
            return worker._finish_output(worker._run_step(scheduler_output))

    @torch.inference_mode()
    def sample_tokens(grammar_output: Any) -> Any:
        with worker._terminating_on_failure("sample_tokens"):
            if worker.guard is not None:
                worker.guard.raise_if_failed()
            return worker._finish_output(super(BackplaneWorker, worker).sample_tokens(grammar_output))

    return {"execute_model": execute_model, "sample_tokens": sample_tokens}


class Engine:
    """Runs smollm2-fp32 and measures the time of each step."""

    def __init__(self, dtype: str, folder: str, now: Callable[[], float]) -> None:
        from vllm import LLM

        from vllm_backplane.models import FULL_PRECISION, obtain

        self.now = now
        self.llm = LLM(
            str(obtain(FULL_PRECISION.name)),
            dtype=dtype,
            max_model_len=512,
            max_num_seqs=16,
            kv_cache_memory_bytes=KV_CACHE,
            enable_prefix_caching=False,
            disable_log_stats=True,
            profiler_config={
                "profiler": "torch",
                "torch_profiler_dir": folder,
                "torch_profiler_with_stack": False,
                "ignore_frontend": True,
            },
        )
        self.worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.bare = without(self.worker)

    def steps(self, sequences: int, mode: str) -> list[float]:
        """Runs `sequences` requests at once and returns the seconds of each decode step."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if mode == "absent":
            vars(self.worker).update(self.bare)
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
            for name in self.bare:
                vars(self.worker).pop(name, None)

    def turns(self, sequences: int, rounds: int) -> dict[str, list[float]]:
        """Returns the median step of each round, by mode. The order of the modes changes from round to round."""
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for turn in range(rounds):
            first = turn % len(MODES)
            order = MODES[first:] + MODES[:first]
            for mode in order if turn % 2 else reversed(order):
                found[mode].append(statistics.median(self.steps(sequences, mode)))
        return found

    def traced(self, sequences: int) -> float:
        self.llm.start_profile()
        try:
            return statistics.median(self.steps(sequences, "off"))
        finally:
            self.llm.stop_profile()


def row(sequences: int, when: str, found: dict[str, list[float]], base: str = "absent") -> str:
    before, off = (1000 * statistics.median(found[mode]) for mode in (base, "off"))
    differences = [1e6 * (after - first) for first, after in zip(found[base], found["off"], strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4)
    return (
        f"| {sequences} | {when} | {base} | {before:.3f} | {off:.3f} | {off / before:.4f} | "
        f"{middle:+.1f} ({low:+.1f} to {high:+.1f}) |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=12, help="of every mode (default: %(default)s, at least 2)")
    parser.add_argument("--processor-time", action="store_true", help="measure the processor time of one thread")
    args = parser.parse_args()
    os.environ.update(
        BACKPLANE_DEVICE=args.device,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the worker is then in this process, which replaces its methods
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(args.dtype, folder, time.thread_time if args.processor_time else time.perf_counter)
        lines = []
        for sequences in args.sequences:
            engine.steps(sequences, "off")
            before = engine.turns(sequences, args.rounds)
            taken = engine.traced(sequences)
            after = engine.turns(sequences, args.rounds)
            for when, found in {"before a trace": before, "after a trace": after}.items():
                lines += [row(sequences, when, found, base) for base in ("absent", "control")]
            lines.append(f"| {sequences} | during a trace | | | {1000 * taken:.3f} | | |")
            print(f"{sequences} sequence(s) done", file=sys.stderr)
    print("\n| sequences | when | compared with | its ms per step | off | ratio | difference in us (quartiles) |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
