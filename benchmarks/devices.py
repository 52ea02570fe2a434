"""Measures the overhead of the simulated NPU: its throughput relative to the cpu device, with the same kernels.

    python benchmarks/devices.py                    # smollm2-fp32 in float32, sim over cpu
    python benchmarks/devices.py --least 0.7        # fail if a ratio is below 0.7
    python benchmarks/devices.py --steps default    # with the default graph mode of each device

Both devices run decode steps in the same graph mode, except with `--steps default`. Two engines serve each request in
turns. The table shows medians and the median of the ratios by turn.

The program also estimates the throughput of a chip from its rates, with the same work on the simulated card:

    python benchmarks/devices.py --model memory=800e9,link=32e9,flops=100e12,overhead=3000
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.turns import OUTPUT, QUIET, add_options, compare, report

PROMPT = 512
SEQUENCES = (1, 16)
WORKLOADS = [(1, 128), (1, PROMPT), (1, 1024), *((sequences, 1) for sequences in SEQUENCES)]
STEPS = {"replayed": "FULL_DECODE_ONLY", "eager": "NONE", "default": None}


def modelled(model: str, dtype: str) -> dict[str, float]:
    """Returns tokens per second of the modelled chip's busy time, without host time, by workload."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(model, dtype=dtype, max_model_len=1024, enable_prefix_caching=False, disable_log_stats=True)

    def busy() -> float:
        [seconds] = llm.collective_rpc("modelled_seconds")
        return float(seconds)

    def seconds(sequences: int, prompt: int, output: int) -> float:
        tokens = [[100 + (place * 7 + sequence) % 900 for place in range(prompt)] for sequence in range(sequences)]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        before = busy()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), use_tqdm=False)
        return busy() - before

    found = {f"prompt of {PROMPT}": PROMPT / seconds(1, PROMPT, 1)}
    for sequences in SEQUENCES:
        prefill = seconds(sequences, 8, 1)
        found[f"decoding {sequences}"] = sequences * (OUTPUT - 1) / (seconds(sequences, 8, OUTPUT) - prefill)
    return found


def modelled_in_subprocess(model: str, dtype: str, rates: str) -> dict[str, float]:
    environment = {**os.environ, **QUIET, "BACKPLANE_DEVICE": "sim", "BACKPLANE_SIM_MODEL": rates}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"  # vLLM writes to standard output
        command = [sys.executable, str(Path(__file__).resolve()), "--engine", model, dtype, str(result)]
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
        measured: dict[str, float] = json.loads(result.read_text())
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=("cpu", "sim"), metavar=("BASE", "OTHER"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", choices=STEPS, default="replayed", help="decode steps (default: %(default)s)")
    parser.add_argument("--least", type=float, metavar="RATIO", help="fail if OTHER over BASE is below this anywhere")
    parser.add_argument("--model", metavar="RATES", help="estimate a chip's throughput; value of BACKPLANE_SIM_MODEL")
    add_options(parser)
    parser.add_argument("--engine", nargs=3, metavar=("MODEL", "DTYPE", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        model, dtype, result = args.engine
        Path(result).write_text(json.dumps(modelled(model, dtype)))
        return 0
    if len(set(args.devices)) == 1:
        parser.error("--devices needs two different devices")
    from vllm_backplane.models import FULL_PRECISION, obtain

    model = str(obtain(FULL_PRECISION.name))
    if args.model:
        found = modelled_in_subprocess(model, args.dtype, args.model)
        if args.json:
            print(json.dumps({"model": args.model, "modelled": found}, indent=2))
            return 0
        print(
            f"\n{FULL_PRECISION.name} in {args.dtype} on a chip with {args.model}, tokens per second while it is busy\n"
        )
        for name, rate in found.items():
            print(f"{name:<18}{rate:>12.1f}")
        return 0
    mode = STEPS[args.steps]
    arguments: dict[str, Any] = {"dtype": args.dtype}
    if mode:
        arguments["compilation_config"] = {"cudagraph_mode": mode}
    sides = {device: (arguments, {"BACKPLANE_DEVICE": device}) for device in args.devices}
    results = compare(model, sides, WORKLOADS, args.rounds)
    return report(f"{FULL_PRECISION.name} in {args.dtype}, decode steps {args.steps}", results, args.least, args.json)


if __name__ == "__main__":
    sys.exit(main())
