"""The simulated NPU beside the cpu device, with the same kernels: what a device in between costs.

    python benchmarks/devices.py                    # the default model in float32, sim over cpu
    python benchmarks/devices.py --devices cpu sim --rounds 5

Engines of both devices take turns, each in a process of its own; the table shows the median over the turns.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=("cpu", "sim"), metavar=("BASE", "OTHER"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from vllm_backplane.models import DEFAULT, obtain

    script = Path(__file__).resolve().with_name("dtypes.py")
    model = str(obtain(DEFAULT.name))
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    results: dict[str, dict[str, list[float]]] = {device: {} for device in args.devices}
    for turn in range(args.rounds):
        for device, found in results.items():
            environment = {**os.environ, **quiet, "BACKPLANE_DEVICE": device}
            with tempfile.TemporaryDirectory() as folder:
                answer = Path(folder) / "answer"
                command = [sys.executable, str(script), "--engine", model, args.dtype, str(answer)]
                subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
                measured = json.loads(answer.read_text())
            for name, value in measured.items():
                found.setdefault(name, []).append(value)
            print(f"turn {turn + 1}: {device} done", file=sys.stderr)
    medians = {device: {name: statistics.median(v) for name, v in found.items()} for device, found in results.items()}
    if args.json:
        print(json.dumps({"all": results, "median": medians}, indent=2))
        return
    base, other = args.devices
    print(f"\n{DEFAULT.name} in {args.dtype}, tokens per second\n")
    print(f"{'workload':<18}{base:>10}{other:>10}{'ratio':>8}")
    for name in medians[base]:
        one, two = medians[base][name], medians[other][name]
        print(f"{name:<18}{one:>10.1f}{two:>10.1f}{two / one:>8.2f}")


if __name__ == "__main__":
    main()
