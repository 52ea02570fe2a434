"""Compares replayed decode steps with eager ones: milliseconds per step of LLM.generate.

    python benchmarks/graphs.py                             # smollm2-fp32, both dtypes, 1, 4, 16 and 64 sequences
    python benchmarks/graphs.py --dtypes float32 --sequences 1 16 --json

One engine per dtype runs both modes in turns: between two calls of generate, its worker is switched between replay and
eager mode. The table shows medians over the turns. The time of a step is the difference between a long and a one-token
generation, divided by the number of additional steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT, OUTPUT = 8, 33
MODES = ("eager", "replayed")


def suspend(worker: Any, suspended: bool) -> int:
    """Switches the worker between replay and eager mode, and returns the number of replayed steps so far."""
    model = worker.model_runner.model
    model.suspended = suspended
    return int(model.calls.replays)


def engine(model: str, dtype: str, sequences: list[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds per step by number of sequences and mode. Starts the engine from this process."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=max(sequences),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def seconds(count: int, output: int) -> float:
        tokens = [[100 + (place * 7 + sequence) % 900 for place in range(PROMPT)] for sequence in range(count)]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - began

    found: dict[str, dict[str, list[float]]] = {}
    for count in sequences:
        found[str(count)] = {mode: [] for mode in MODES}
        seconds(count, 4)
        for turn in range(rounds):
            for mode in MODES if turn % 2 == 0 else reversed(MODES):
                [before] = llm.collective_rpc(suspend, args=(mode == "eager",))
                first = seconds(count, 1)
                found[str(count)][mode].append((seconds(count, OUTPUT) - first) / (OUTPUT - 1))
                [after] = llm.collective_rpc(suspend, args=(False,))
                if (after > before) != (mode == "replayed"):
                    raise SystemExit(f"{after - before} steps of {count} sequences were replayed in mode {mode}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", nargs=3, metavar=("MODEL", "DTYPE", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        model, dtype, result = args.engine
        Path(result).write_text(json.dumps(engine(model, dtype, args.sequences, args.rounds)))
        return 0
    from vllm_backplane.models import FULL_PRECISION, obtain

    model = str(obtain(FULL_PRECISION.name))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `suspend` is sent to the worker
    }
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    counts = [str(count) for count in args.sequences]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"  # vLLM writes to standard output
        for dtype in args.dtypes:
            command = [sys.executable, str(Path(__file__).resolve()), "--engine", model, dtype, str(result)]
            command += ["--rounds", str(args.rounds), "--sequences", *counts]
            subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
            results[dtype] = json.loads(result.read_text())
    if args.json:
        print(json.dumps(results, indent=2))
        return 0
    print(f"\n{FULL_PRECISION.name}, milliseconds per decode step, median of {args.rounds}\n")
    print(f"{'dtype':<10}{'sequences':>10}{'eager':>10}{'replayed':>10}{'speed':>8}{'range':>14}")
    for dtype, found in results.items():
        for count, modes in found.items():
            eager, replayed = (1000 * statistics.median(modes[mode]) for mode in MODES)
            ratios = [one / other for one, other in zip(modes["eager"], modes["replayed"], strict=True)]
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            print(f"{dtype:<10}{count:>10}{eager:>10.2f}{replayed:>10.2f}{eager / replayed:>8.2f}{spread:>14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
