"""Measures the cost of the numeric guard: tokens per second with the guard at layers and at modules, relative to off.

    python benchmarks/numeric_guard.py                    # smollm2-fp32 in float32 on the cpu device
    python benchmarks/numeric_guard.py --device sim --rounds 9

The guard is switched in the running engine, and the modes are measured in turns, so that other load on the machine
affects all of them. Checks of copies stay off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

MODES = ("off", "layers", "modules")
WORKLOADS = {"prompt of 512": (1, 512, 1), "decoding 1": (1, 8, 32), "decoding 16": (16, 8, 32)}


def watch(worker: Any, mode: str) -> int:
    """Sets the mode of the worker's guard, and returns the number of watched modules."""
    worker.set_numeric_guard(mode)
    return len(worker.guard.watched) if worker.guard else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.update(
        BACKPLANE_DEVICE=args.device,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the worker is then in this process, which switches its guard
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from vllm_backplane.models import FULL_PRECISION, obtain

    model = str(obtain(FULL_PRECISION.name))
    llm = LLM(model, dtype=args.dtype, max_model_len=1024, enable_prefix_caching=False, disable_log_stats=True)

    def rate(sequences: int, prompt: int, output: int) -> float:
        tokens = [[100 + (place * 7 + sequence) % 900 for place in range(prompt)] for sequence in range(sequences)]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), use_tqdm=False)
        return sequences * (prompt + output) / (time.perf_counter() - began)

    results: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in WORKLOADS} for mode in MODES}
    rate(1, 64, 8)
    watched: dict[str, int] = {}
    for turn in range(args.rounds):
        for name, workload in WORKLOADS.items():
            for mode in MODES:
                watched[mode] = llm.collective_rpc(watch, args=(mode,))[0]
                results[mode][name].append(rate(*workload))
        print(f"turn {turn + 1} of {args.rounds} done", file=sys.stderr)
    medians = {mode: {name: statistics.median(v) for name, v in found.items()} for mode, found in results.items()}
    if args.json:
        print(json.dumps({"all": results, "median": medians, "modules": watched}, indent=2))
        return
    print(f"\n{FULL_PRECISION.name} in {args.dtype} on {args.device}, tokens per second; ratio to off")
    print(f"watched modules: {watched['layers']} at layers, {watched['modules']} at modules\n")
    print(f"{'workload':<16}" + "".join(f"{mode:>10}" for mode in MODES) + f"{'layers':>9}{'modules':>9}")
    for name in WORKLOADS:
        values = [medians[mode][name] for mode in MODES]
        print(
            f"{name:<16}"
            + "".join(f"{v:>10.1f}" for v in values)
            + "".join(f"{v / values[0]:>9.3f}" for v in values[1:])
        )


if __name__ == "__main__":
    main()
