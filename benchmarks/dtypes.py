"""bfloat16 beside float32 through the whole engine: tokens per second when decoding and when reading a prompt.

    python benchmarks/dtypes.py                     # the default model, as this machine is
    python benchmarks/dtypes.py --without-bf16      # as a machine without BF16 instructions would do it (x86 only)

Engines of both types take turns, each in a process of its own; the table shows the median over the turns.
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

LIMIT = "ONEDNN_MAX_CPU_ISA"
PROMPTS, ANSWER = (128, 512, 1024), 48
SEQUENCES = (1, 16)
REPEATS = 5


def engine(model: str, dtype: str, steps: str | None) -> dict[str, float]:
    """Tokens per second by workload, in this process; `steps` is vLLM's cudagraph_mode, None the device's default."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    stated = {"compilation_config": {"cudagraph_mode": steps}} if steps else {}
    llm = LLM(model, dtype=dtype, max_model_len=2048, enable_prefix_caching=False, disable_log_stats=True, **stated)

    def seconds(sequences: int, prompt: int, answer: int) -> float:
        tokens = [[100 + (place * 7 + sequence) % 900 for place in range(prompt)] for sequence in range(sequences)]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - began

    def usual(sequences: int, prompt: int, answer: int) -> float:
        return statistics.median(seconds(sequences, prompt, answer) for _ in range(REPEATS))

    seconds(1, PROMPTS[-1], 4)
    found = {f"prompt of {length}": length / usual(1, length, 1) for length in PROMPTS}
    for sequences in SEQUENCES:
        begun = usual(sequences, 8, 1)
        found[f"decoding {sequences}"] = sequences * (ANSWER - 1) / (usual(sequences, 8, ANSWER) - begun)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-bf16", action="store_true", help=f"sets {LIMIT}=AVX512_CORE")
    parser.add_argument("--least", type=float, metavar="RATIO", help="fail if bfloat16 is below this in any workload")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", nargs=3, metavar=("MODEL", "DTYPE", "ANSWER"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        model, dtype, answer = args.engine
        Path(answer).write_text(json.dumps(engine(model, dtype, args.steps)))
        return 0
    from vllm_backplane.models import DEFAULT, obtain

    model = str(obtain(DEFAULT.name))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if args.without_bf16:
        environment[LIMIT] = "AVX512_CORE"
    results: dict[str, dict[str, list[float]]] = {"float32": {}, "bfloat16": {}}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"  # standard output belongs to vLLM
        for turn in range(args.rounds):
            for dtype, found in results.items():
                command = [sys.executable, str(Path(__file__).resolve()), "--engine", model, dtype, str(answer)]
                subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
                for name, value in json.loads(answer.read_text()).items():
                    found.setdefault(name, []).append(value)
                print(f"turn {turn + 1}: {dtype} done", file=sys.stderr)
    medians = {dtype: {name: statistics.median(v) for name, v in found.items()} for dtype, found in results.items()}
    slow = [name for name, wide in medians["float32"].items() if medians["bfloat16"][name] < (args.least or 0) * wide]
    if args.json:
        print(json.dumps({"limit": environment.get(LIMIT), "all": results, "median": medians}, indent=2))
        return int(bool(slow))
    print(f"\n{DEFAULT.name}, tokens per second, {LIMIT}={environment.get(LIMIT, '(not set)')}\n")
    print(f"{'workload':<18}{'float32':>10}{'bfloat16':>10}{'ratio':>8}")
    for name in medians["float32"]:
        wide, narrow = medians["float32"][name], medians["bfloat16"][name]
        print(f"{name:<18}{wide:>10.1f}{narrow:>10.1f}{narrow / wide:>8.2f}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
