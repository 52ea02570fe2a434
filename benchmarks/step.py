"""Breaks down the time of a decode step into kernels, and the code that runs between them.

    python benchmarks/step.py                       # smollm2-fp32, 1 and 16 sequences, replayed and eager
    python benchmarks/step.py --dtype bfloat16 --profile 25
    python benchmarks/step.py --quantization int4
    python benchmarks/step.py --quantization int8 --operators
    python benchmarks/step.py --quantization int8 --prompt 1024   # breaks down prefill

One engine runs in the measuring process and is timed part by part, each part without the parts inside it; replayed and
eager steps take turns. A second engine, in a separate process as vLLM runs it by default, is timed as a whole: its
additional time is the communication between the processes. `--profile N` shows the time of Python by function instead,
and `--operators` the time of kernels by operator and result shape. `--prompt N` does so for the prefill of N tokens in
one step, with PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, SKIPPED = 8, 41, 4
PARTS = {
    "kernels": "kernels of the forward pass (one replay)",
    "forward": "rest of the forward pass: Python, checks of the inputs",
    "logits": "logits",
    "sampling": "sampling and its bookkeeping",
    "inputs": "inputs and attention metadata",
    "scheduler": "scheduler",
    "output": "engine loop and output",
}


class Clock:
    """Measures the time of parts in each step, without the time of the parts inside them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.open: list[float] = []
        self.step: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            self.open.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                spent = self.now() - began
                self.step[part] += spent - self.open.pop()
                if self.open:
                    self.open[-1] += spent
                else:
                    self.steps.append(dict(self.step))
                    self.step.clear()

        return run


def start(model: str, dtype: str, quantization: str | None, sequences: list[int], max_model_len: int = 512) -> Any:
    from vllm import LLM

    return LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(max_model_len, 2048),
        max_num_seqs=max(sequences),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def generate(llm: Any, count: int, output: int = OUTPUT, length: int = PROMPT) -> float:
    """Generates `output` tokens for each of `count` prompts of `length` tokens, and returns the seconds."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    tokens = [[100 + (place * 7 + sequence) % 900 for place in range(length)] for sequence in range(count)]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began


def by_part(
    model: str, dtype: str, quantization: str | None, sequences: list[int], rounds: int, now: Callable[[], float]
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns milliseconds by number of sequences, mode and part. Needs the engine in this process."""
    from vllm_backplane.devices.cpu.graphs import CpuGraph

    llm, clock = start(model, dtype, quantization, sequences), Clock(now)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    llm.llm_engine.step = clock.timed("output", llm.llm_engine.step)
    core.scheduler.schedule = clock.timed("scheduler", core.scheduler.schedule)
    core.scheduler.update_from_output = clock.timed("scheduler", core.scheduler.update_from_output)
    runner.execute_model = clock.timed("inputs", runner.execute_model)
    runner.sample_tokens = clock.timed("sampling", runner.sample_tokens)
    runner._model_forward = clock.timed("forward", runner._model_forward)
    inner = runner.get_model()
    inner.compute_logits = clock.timed("logits", inner.compute_logits)
    CpuGraph.replay = clock.timed("kernels", CpuGraph.replay)  # type: ignore[method-assign]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for count in sequences:
        generate(llm, count)
        steps: dict[str, list[dict[str, float]]] = {"replayed": [], "eager": []}
        for _ in range(rounds):
            for mode, taken in steps.items():
                runner.model.suspended = mode == "eager"
                clock.steps.clear()
                generate(llm, count)
                taken += clock.steps[SKIPPED:-1]
        found[str(count)] = {
            mode: {part: 1000 * statistics.median(step.get(part, 0.0) for step in taken) for part in PARTS}
            | {"step": 1000 * statistics.median(sum(step.values()) for step in taken)}
            for mode, taken in steps.items()
        }
    return found


def whole(model: str, dtype: str, quantization: str | None, sequences: list[int], rounds: int) -> dict[str, float]:
    """Returns milliseconds per replayed step by number of sequences, as a caller of LLM.generate measures it."""
    llm = start(model, dtype, quantization, sequences)
    found = {}
    for count in sequences:
        generate(llm, count)
        differences = [generate(llm, count) - generate(llm, count, 1) for _ in range(rounds)]
        found[str(count)] = 1000 * statistics.median(differences) / (OUTPUT - 1)
    return found


def profile(model: str, dtype: str, quantization: str | None, sequences: list[int], lines: int) -> None:
    llm = start(model, dtype, quantization, sequences)
    for count in sequences:
        generate(llm, count)
        profiler = cProfile.Profile()
        profiler.runcall(generate, llm, count)
        print(f"\n{count} sequences, {OUTPUT} steps", flush=True)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def operators(model: str, dtype: str, quantization: str | None, sequences: list[int], rounds: int) -> None:
    from vllm_backplane.devices.cpu.graphs import CpuGraph

    llm, replays = start(model, dtype, quantization, sequences), []
    CpuGraph.replay = lambda graph: replays.append(graph.timed_replay())  # type: ignore[assignment, method-assign]
    for count in sequences:
        generate(llm, count)
        replays.clear()
        for _ in range(rounds):
            generate(llm, count)
        spent: dict[str, list[float]] = defaultdict(list)
        calls: dict[str, int] = defaultdict(int)
        for replay in replays:
            step: dict[str, float] = defaultdict(float)
            for name, seconds in replay:
                step[name] += seconds
            for name, seconds in step.items():
                spent[name].append(seconds)
                calls[name] = sum(1 for one, _ in replay if one == name)
        medians = {name: 1e6 * statistics.median(all_of_it) for name, all_of_it in spent.items()}
        print(f"\n| {count} sequence(s) | calls | us per step | us per call |\n| --- | ---: | ---: | ---: |")
        for name, each in sorted(medians.items(), key=lambda one: -one[1]):
            print(f"| {name} | {calls[name]} | {each:.0f} | {each / calls[name]:.1f} |")
        print(f"| all | {sum(calls.values())} | {sum(medians.values()):.0f} | |", flush=True)


def prompt(model: str, dtype: str, quantization: str | None, length: int, rounds: int) -> None:
    import torch

    llm = start(model, dtype, quantization, [1], length + 1)
    generate(llm, 1, 1, length)
    unprofiled = statistics.median(generate(llm, 1, 1, length) for _ in range(rounds))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(rounds):
            generate(llm, 1, 1, length)
    found = {event.key: (event.count / rounds, event.self_cpu_time_total / rounds) for event in profiler.key_averages()}
    rate = f"{length} tokens in {1000 * unprofiled:.0f} ms, {length / unprofiled:.0f} tokens/s"
    print(f"\n{rate}; operators with a share of 1 % or more:\n")
    print("| operator | calls | ms | share |\n| --- | ---: | ---: | ---: |")
    for name, (calls, spent) in sorted(found.items(), key=lambda one: -one[1][1]):
        if spent > 1e4 * unprofiled:
            print(f"| `{name}` | {calls:.0f} | {spent / 1000:.1f} | {spent / unprofiled / 1e4:.0f} % |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model, such as one of make bench (default: smollm2 in float32)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", help="int8 or int4; default: none")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure the processor time of one thread, on a machine under other load; one process only",
    )
    parser.add_argument("--profile", type=int, metavar="LINES")
    parser.add_argument("--operators", action="store_true", help="break down the time of replayed kernels")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="break down the time of prefill")
    parser.add_argument("--part", nargs=2, metavar=("PART", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    from vllm_backplane.models import FULL_PRECISION, obtain

    model = args.model or str(obtain(FULL_PRECISION.name))
    if args.part:
        arguments = (model, args.dtype, args.quantization, args.sequences, args.rounds)
        now = time.thread_time if args.processor_time else time.perf_counter
        found = by_part(*arguments, now) if args.part[0] == "by part" else whole(*arguments)
        Path(args.part[1]).write_text(json.dumps(found))
        return 0
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if args.operators:
        os.environ.update(quiet | inside)
        operators(model, args.dtype, args.quantization, args.sequences, args.rounds)
        return 0
    if args.prompt:
        os.environ.update(quiet | inside)
        prompt(model, args.dtype, args.quantization, args.prompt, args.rounds)
        return 0
    if args.profile:
        os.environ.update(quiet | inside)
        profile(model, args.dtype, args.quantization, args.sequences, args.profile)
        return 0
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"  # vLLM writes to standard output
        parts: dict[str, dict[str, str]] = {"by part": inside}
        if args.processor_time:
            inside["OMP_NUM_THREADS"] = "1"
        else:
            parts["whole"] = {}
        for part, more in parts.items():
            command = [sys.executable, str(Path(__file__).resolve()), "--part", part, str(result)]
            command += ["--dtype", args.dtype, "--rounds", str(args.rounds)]
            command += ["--sequences", *map(str, args.sequences), *(["--processor-time"] * args.processor_time)]
            if args.model:
                command += ["--model", args.model]
            if args.quantization:
                command += ["--quantization", args.quantization]
            subprocess.run(command, env={**os.environ, **quiet, **more}, stdout=sys.stderr, check=True)
            results[part] = json.loads(result.read_text())
    weights = f", {args.quantization} weights" if args.quantization else ""
    print(f"\n{args.model or FULL_PRECISION.name}, {args.dtype}{weights}, milliseconds per decode step (medians)\n")
    for count, modes in results["by part"].items():
        print(f"| {count} sequence(s) | replayed | eager |\n| --- | ---: | ---: |")
        for part, title in PARTS.items():
            eager = "in the next row" if part == "kernels" else f"{modes['eager'][part]:.3f}"
            print(f"| {title} | {modes['replayed'][part]:.3f} | {eager} |")
        print(f"| whole step, one process | {modes['replayed']['step']:.3f} | {modes['eager']['step']:.3f} |")
        if "whole" in results:
            between = results["whole"][count] - modes["replayed"]["step"]
            print(f"| communication between the processes | {between:.3f} | |")
            print(f"| whole step, as vLLM runs by default | {results['whole'][count]:.3f} | |")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
