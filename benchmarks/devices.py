"""The simulated NPU beside the cpu device, with the same kernels: what a device in between costs.

    python benchmarks/devices.py                    # the default model in float32, sim over cpu
    python benchmarks/devices.py --devices cpu sim --rounds 5 --least 0.7
    python benchmarks/devices.py --steps eager      # without graphs of decode steps

Both devices run decode steps in the same way: left to themselves, one replays them and the other does not. Engines of
both take turns, each in a process of its own; the table shows the median over the turns.

And how fast a chip would be that is described by its rates, with the same work on the simulated card:

    python benchmarks/devices.py --model memory=800e9,link=32e9,flops=100e12,overhead=3000
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dtypes import ANSWER, SEQUENCES

PROMPT = 512
STEPS = {"replayed": "FULL_DECODE_ONLY", "eager": "NONE"}


def modelled(model: str, dtype: str) -> dict[str, float]:
    """Tokens per second of the modelled chip's busy time, by workload, in this process; the host's is not in it."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(model, dtype=dtype, max_model_len=1024, enable_prefix_caching=False, disable_log_stats=True)

    def busy() -> float:
        [seconds] = llm.collective_rpc("modelled_seconds")
        return float(seconds)

    def seconds(sequences: int, prompt: int, answer: int) -> float:
        tokens = [[100 + (place * 7 + sequence) % 900 for place in range(prompt)] for sequence in range(sequences)]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        before = busy()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True), use_tqdm=False)
        return busy() - before

    found = {f"prompt of {PROMPT}": PROMPT / seconds(1, PROMPT, 1)}
    for sequences in SEQUENCES:
        begun = seconds(sequences, 8, 1)
        found[f"decoding {sequences}"] = sequences * (ANSWER - 1) / (seconds(sequences, 8, ANSWER) - begun)
    return found


def in_a_process(script: str, device: str, model: str, dtype: str, *more: str, **variables: str) -> dict[str, float]:
    """What an engine on `device` measures, by the script of this folder that has it."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment = {**os.environ, **quiet, "BACKPLANE_DEVICE": device, **variables}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"  # standard output belongs to vLLM
        program = str(Path(__file__).resolve().with_name(script))
        command = [sys.executable, program, "--engine", model, dtype, str(answer), *more]
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
        measured: dict[str, float] = json.loads(answer.read_text())
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=("cpu", "sim"), metavar=("BASE", "OTHER"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", choices=STEPS, default="replayed", help="decode steps (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", type=float, metavar="RATIO", help="fail if OTHER over BASE is below this anywhere")
    parser.add_argument("--model", metavar="RATES", help="BACKPLANE_SIM_MODEL: a chip; prints its tokens per second")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", nargs=3, metavar=("MODEL", "DTYPE", "ANSWER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        model, dtype, answer = args.engine
        Path(answer).write_text(json.dumps(modelled(model, dtype)))
        return 0
    from vllm_backplane.models import DEFAULT, obtain

    model = str(obtain(DEFAULT.name))
    if args.model:
        found = in_a_process("devices.py", "sim", model, args.dtype, BACKPLANE_SIM_MODEL=args.model)
        if args.json:
            print(json.dumps({"model": args.model, "modelled": found}, indent=2))
            return 0
        print(f"\n{DEFAULT.name} in {args.dtype} on a chip with {args.model}, tokens per second while it is busy\n")
        for name, rate in found.items():
            print(f"{name:<18}{rate:>12.1f}")
        return 0
    results: dict[str, dict[str, list[float]]] = {device: {} for device in args.devices}
    for turn in range(args.rounds):
        for device, measured in results.items():
            for name, value in in_a_process(
                "dtypes.py", device, model, args.dtype, "--steps", STEPS[args.steps]
            ).items():
                measured.setdefault(name, []).append(value)
            print(f"turn {turn + 1}: {device} done", file=sys.stderr)
    medians = {device: {name: statistics.median(v) for name, v in found.items()} for device, found in results.items()}
    base, other = args.devices
    ratios = {name: medians[other][name] / one for name, one in medians[base].items()}
    slow = [name for name, ratio in ratios.items() if ratio < (args.least or 0)]
    if args.json:
        print(json.dumps({"all": results, "median": medians, "ratio": ratios}, indent=2))
        return int(bool(slow))
    print(f"\n{DEFAULT.name} in {args.dtype}, decode steps {args.steps}, tokens per second\n")
    print(f"{'workload':<18}{base:>10}{other:>10}{'ratio':>8}")
    for name, ratio in ratios.items():
        print(f"{name:<18}{medians[base][name]:>10.1f}{medians[other][name]:>10.1f}{ratio:>8.2f}")
    for name in slow:
        print(f"{name}: below {args.least}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
