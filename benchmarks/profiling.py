"""What profiling costs a decode step while no trace is taken: the worker as it is, over one that knows nothing of it.

    python benchmarks/profiling.py                                     # by the clock
    OMP_NUM_THREADS=1 python benchmarks/profiling.py --processor-time  # on a machine that is not quiet
    python benchmarks/profiling.py --device sim

One engine, to which `--profiler-config` is given, lives in this process. Ways take turns, request by request: its
worker's methods as they are (*off*), the same without what profiling adds to them (*absent*), and *off* once more
(*control*). Two rows say what the others are worth. Between *off* and *control* there is nothing but chance, and a
difference from *absent* that is no larger says nothing; while a trace is taken there is a difference, which must be
seen. After the trace the ways are measured again, where everything that it put on the modules must have gone.
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

PROMPT, ANSWER, SKIPPED = 8, 41, 4
"""Tokens of a request, and steps at its beginning that are not counted."""
WAYS = ("absent", "off", "control")
KV_CACHE = 256 << 20
"""Bytes: on a device with memory of its own, all that is free would be taken."""


def without(worker: Any) -> dict[str, Callable[[Any], Any]]:
    """The two methods of the worker that profiling is in, without it."""
    import torch

    from vllm_backplane.worker.worker import BackplaneWorker

    def execute_model(scheduler_output: Any) -> Any:
        with worker._heard("execute_model"):
            return worker._told(worker._execute_model(scheduler_output))

    @torch.inference_mode()
    def sample_tokens(grammar_output: Any) -> Any:
        with worker._heard("sample_tokens"):
            if worker.guard is not None:
                worker.guard.insist()
            return worker._told(super(BackplaneWorker, worker).sample_tokens(grammar_output))

    return {"execute_model": execute_model, "sample_tokens": sample_tokens}


class Engine:
    """The default model, and the time of each of its steps."""

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

    def steps(self, sequences: int, way: str) -> list[float]:
        """Seconds of each decode step of one request per sequence."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if way == "absent":
            vars(self.worker).update(self.bare)
        try:
            engine, found = self.llm.llm_engine, []
            parameters = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
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
        """The median step of each round, by way; which way is first changes from round to round."""
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            first = turn % len(WAYS)
            order = WAYS[first:] + WAYS[:first]
            for way in order if turn % 2 else reversed(order):
                found[way].append(statistics.median(self.steps(sequences, way)))
        return found

    def traced(self, sequences: int) -> float:
        self.llm.start_profile()
        try:
            return statistics.median(self.steps(sequences, "off"))
        finally:
            self.llm.stop_profile()


def row(sequences: int, when: str, found: dict[str, list[float]], base: str = "absent") -> str:
    before, off = (1000 * statistics.median(found[way]) for way in (base, "off"))
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
    parser.add_argument("--rounds", type=int, default=12, help="of every way (default: %(default)s, at least 2)")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, for a machine that is not quiet")
    args = parser.parse_args()
    os.environ.update(
        BACKPLANE_DEVICE=args.device,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the worker is then here, and its methods can be exchanged
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
            for when, found in {"before a trace": before, "after one": after}.items():
                lines += [row(sequences, when, found, base) for base in ("absent", "control")]
            lines.append(f"| {sequences} | while one is taken | | | {1000 * taken:.3f} | | |")
            print(f"{sequences} sequence(s) done", file=sys.stderr)
    print("\n| sequences | when | held against | its ms per step | off | ratio | difference in us (quartiles) |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
