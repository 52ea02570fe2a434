"""Compares speculative with plain decoding of one sequence, in tokens per second, on repetitive and other texts.

    python benchmarks/speculation.py                        # n-gram, and suffix where arctic-inference is installed
    python benchmarks/speculation.py --drafts 8 --rounds 5 --json

The engines serve each request in turns. The tables show medians, and the median and quartiles of the ratios by turn.
Rates are those of the tokens after the first one, with greedy sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib.util import find_spec
from typing import Any

from benchmarks.turns import KV_CACHE, add_options, compare, ratios_by_turn, report, take_standard_output

OUTPUT = 65
LINE = "A line that is written once more: the ferry leaves at nine and comes back at noon.\n"
METHODS: dict[str, dict[str, Any]] = {"ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}}
if find_spec("arctic_inference") is not None:
    METHODS["suffix"] = {"suffix_decoding_max_cached_requests": 0}
    """The cache is off, because it would have the response to the same request of the previous turn."""
REPEATING = ("repeated line", "records")
TEXTS = {
    "repeated line": LINE * 6,
    "records": "".join(
        f'{{"id": {number}, "name": "item {number}", "in_stock": true, "price": {number}.50, "currency": "EUR"}}\n'
        for number in range(1, 7)
    ),
    "prose": "Once there was a fox who could not sleep. Every night he counted the stars above the barn, and",
}


def serve(model: str, arguments: dict[str, Any]) -> None:
    """Reads names of texts, a line of JSON each, and writes the tokens per second of each."""
    results = take_standard_output()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        max_model_len=2048,
        max_num_seqs=1,
        kv_cache_memory_bytes=KV_CACHE,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **arguments,
    )

    def seconds(text: str, output: int) -> float:
        began = time.perf_counter()
        llm.generate(text, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - began

    print("ready", file=results, flush=True)
    for line in sys.stdin:
        text = TEXTS[json.loads(line)]
        prefill = seconds(text, 1)
        print((OUTPUT - 1) / (seconds(text, OUTPUT) - prefill), file=results, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens per step (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--least", type=float, metavar="RATIO", help="fail if a repetitive text is below this")
    add_options(parser)
    args = parser.parse_args()
    from vllm_backplane.models import FULL_PRECISION, obtain

    methods = {method: METHODS[method] for method in args.methods}
    sides: dict[str, tuple[dict[str, Any], dict[str, str]]] = {"plain": ({"dtype": args.dtype}, {})}
    for method, more in methods.items():
        drafting = {"method": method, "num_speculative_tokens": args.drafts, **more}
        sides[method] = ({"dtype": args.dtype, "speculative_config": drafting}, {})
    results = compare(str(obtain(FULL_PRECISION.name)), sides, list(TEXTS), args.rounds, __file__)
    ratios = {method: ratios_by_turn(results, "plain", method) for method in methods}
    medians = {method: {text: statistics.median(turns) for text, turns in by.items()} for method, by in ratios.items()}
    if args.json:
        print(json.dumps({"drafts": args.drafts, "all": results, "ratio": medians}, indent=2))
    else:
        for method in methods:
            title = f"{FULL_PRECISION.name}, {args.dtype}, {args.drafts} draft tokens"
            report(title, {side: results[side] for side in ("plain", method)}, None, as_json=False)
    slow = [(method, text) for method in methods for text in REPEATING if medians[method][text] < (args.least or 0)]
    for method, text in slow:
        print(f"{method}, {text}: below {args.least}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        serve(sys.argv[1], json.loads(sys.argv[2]))
    else:
        sys.exit(main())
