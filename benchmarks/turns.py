"""Compares engines that serve the same requests in turns, each in its own process, all running at the same time.

Other load on a machine changes from minute to minute, by more than the difference to be measured. The request to one
engine therefore follows that to the other within a second, and their ratio is computed turn by turn.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

OUTPUT = 48
"""Output tokens of a decode workload."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
PAUSE = 0.3  # seconds after which threads of the other engine no longer spin
KV_CACHE = 512 << 20
EXIT_TIMEOUT = 30  # seconds for an engine to end
KERNELS = "BENCHMARK_CPU_KERNELS"  # instructions of the CPU kernels: 0 for the architecture's baseline, 1 for AVX2
TIMEOUT = 600  # seconds for a response of an engine, whose process may have been killed

Workload = tuple[int, int] | str
"""(sequences, tokens of each prompt), where a prompt of one token measures decode; or a name for another script."""


def name_of(workload: Workload) -> str:
    if isinstance(workload, str):
        return workload
    sequences, prompt = workload
    return f"decoding {sequences}" if prompt == 1 else f"prompt of {prompt}"


def take_standard_output() -> TextIO:
    """Returns a stream to standard output for results, and redirects everything that vLLM prints to standard error."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def serve(model: str, arguments: dict[str, Any]) -> None:
    """Reads workloads, a line of JSON each, and writes the tokens per second of each."""
    results = take_standard_output()
    if isa := os.environ.get(KERNELS):
        from vllm_backplane.devices.cpu import native

        if ctypes.CDLL(str(native._PATH)).backplane_cpu_force_isa(int(isa)) != int(isa):
            raise SystemExit(f"this processor does not support the instructions of {KERNELS}={isa}")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model,
        max_model_len=2048,
        kv_cache_memory_bytes=KV_CACHE,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **arguments,
    )

    def seconds(sequences: int, prompt: int, output: int) -> float:
        tokens = [[100 + (place * 7 + sequence) % 900 for place in range(prompt)] for sequence in range(sequences)]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - began

    print("ready", file=results, flush=True)
    for line in sys.stdin:
        sequences, prompt = json.loads(line)
        if prompt == 1:
            prefill = seconds(sequences, 8, 1)
            rate = sequences * (OUTPUT - 1) / (seconds(sequences, 8, OUTPUT) - prefill)
        else:
            rate = sequences * prompt / seconds(sequences, prompt, 1)
        print(rate, file=results, flush=True)


class Engine:
    """Sends workloads to a process that runs `serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._line()

    def _line(self) -> str:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], TIMEOUT)[0]:
            raise SystemExit(f"an engine has not responded for {TIMEOUT} s; its output is above")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with status {self.process.wait()}; its output is above")
        return line

    def rate(self, workload: Workload) -> float:
        """Runs a workload and returns its tokens per second."""
        assert self.process.stdin
        try:
            print(json.dumps(workload), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self.process.wait()  # reading the missing line raises the error
        return float(self._line())


@contextmanager
def engine(
    model: str, arguments: dict[str, Any], variables: dict[str, str], script: str = __file__
) -> Iterator[Engine]:
    command = [sys.executable, str(Path(script).resolve()), model, json.dumps(arguments)]
    environment = {**os.environ, **QUIET, **variables}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield Engine(process)
    finally:
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.close()  # ends the engine, unless it is busy or waits for a process that has ended
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def compare(
    model: str,
    sides: dict[str, tuple[dict[str, Any], dict[str, str]]],
    workloads: Sequence[Workload],
    rounds: int,
    script: str = __file__,
) -> dict[str, dict[str, list[float]]]:
    """Returns tokens per second by side, workload and turn.

    A side has the arguments of an engine, and the environment variables of its process, which runs `script`.
    """
    results: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    with ExitStack() as stack:
        engines = {side: stack.enter_context(engine(model, *how, script)) for side, how in sides.items()}
        for workload in workloads:
            for one in engines.values():
                one.rate(workload)  # warm-up
            for turn in range(rounds):
                for side, one in list(engines.items())[:: 1 if turn % 2 else -1]:
                    time.sleep(PAUSE)
                    results[side].setdefault(name_of(workload), []).append(one.rate(workload))
            summary = ", ".join(f"{side} {rates[name_of(workload)]:.1f}" for side, rates in medians(results).items())
            print(f"{name_of(workload)}, {rounds} turns: {summary} tokens/s", file=sys.stderr)
    return results


def medians(results: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {side: {name: statistics.median(rates) for name, rates in by.items()} for side, by in results.items()}


def ratios_by_turn(results: dict[str, dict[str, list[float]]], base: str, other: str) -> dict[str, list[float]]:
    """Returns the rate of `other` divided by that of `base`, by workload and turn."""
    return {
        name: [after / before for before, after in zip(rates, results[other][name], strict=True)]
        for name, rates in results[base].items()
    }


def quartiles(values: list[float]) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return lower, upper


def add_options(parser: argparse.ArgumentParser) -> None:
    def turns(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of turns (1 or more)")
        return int(text)

    parser.add_argument("--rounds", type=turns, default=11, help="turns of each workload (default: %(default)s)")
    parser.add_argument("--json", action="store_true")


def report(
    title: str, results: dict[str, dict[str, list[float]]], least: float | None, as_json: bool, **more: Any
) -> int:
    """Prints both sides and their ratio. Returns 1 if a ratio is below `least`, otherwise 0."""
    base, other = results
    rates_of, turns = medians(results), ratios_by_turn(results, base, other)
    ratio = {name: statistics.median(values) for name, values in turns.items()}
    spread = {name: quartiles(values) for name, values in turns.items()}
    slow = [name for name, value in ratio.items() if value < (least or 0)]
    if as_json:
        print(json.dumps({**more, "all": results, "median": rates_of, "ratio": ratio, "quartiles": spread}, indent=2))
    else:
        print(f"\n{title}, tokens per second, medians\n\n{'workload':<18}{base:>10}{other:>10}{'ratio':>8}  quartiles")
        for name, value in ratio.items():
            low, high = spread[name]
            rates = f"{rates_of[base][name]:>10.1f}{rates_of[other][name]:>10.1f}"
            print(f"{name:<18}{rates}{value:>8.2f}  {low:.2f} to {high:.2f}")
    for name in slow:
        print(f"{name}: below {least}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
