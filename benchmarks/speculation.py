"""Speculation beside plain decoding of one sequence: tokens per second on texts that repeat themselves, and on one that
does not.

    python benchmarks/speculation.py                        # n-gram, and suffix where arctic-inference is installed
    python benchmarks/speculation.py --drafts 8 --rounds 5 --json

The engines answer each request in turns; the tables show medians, and the median and quartiles of the turns' ratios. A
rate is that of the tokens after the first one; answers are greedy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib.util import find_spec
from typing import Any

from benchmarks.turns import KV_CACHE, add_options, answering, by_turn, compared, report

ANSWER = 65
LINE = "A line that is written once more: the ferry leaves at nine and comes back at noon.\n"
METHODS: dict[str, dict[str, Any]] = {"ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}}
if find_spec("arctic_inference") is not None:
    METHODS["suffix"] = {"suffix_decoding_max_cached_requests": 0}
    """It would recall its answer to the same request of the turn before."""
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
    """Answers names of texts, a line of JSON each, with tokens per second."""
    answers = answering()
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

    def seconds(text: str, answer: int) -> float:
        began = time.perf_counter()
        llm.generate(text, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - began

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        text = TEXTS[json.loads(line)]
        begun = seconds(text, 1)
        print((ANSWER - 1) / (seconds(text, ANSWER) - begun), file=answers, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=4, help="tokens drafted at a time (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--least", type=float, metavar="RATIO", help="fail if a text that repeats itself is below this")
    add_options(parser)
    args = parser.parse_args()
    from vllm_backplane.models import FULL_PRECISION, obtain

    methods = {method: METHODS[method] for method in args.methods}
    sides: dict[str, tuple[dict[str, Any], dict[str, str]]] = {"plain": ({"dtype": args.dtype}, {})}
    for method, more in methods.items():
        drafting = {"method": method, "num_speculative_tokens": args.drafts, **more}
        sides[method] = ({"dtype": args.dtype, "speculative_config": drafting}, {})
    results = compared(str(obtain(FULL_PRECISION.name)), sides, list(TEXTS), args.rounds, __file__)
    ratios = {method: by_turn(results, "plain", method) for method in methods}
    usual = {method: {text: statistics.median(turns) for text, turns in by.items()} for method, by in ratios.items()}
    if args.json:
        print(json.dumps({"drafts": args.drafts, "all": results, "ratio": usual}, indent=2))
    else:
        for method in methods:
            title = f"{FULL_PRECISION.name}, {args.dtype}, {args.drafts} drafts at a time"
            report(title, {side: results[side] for side in ("plain", method)}, None, as_json=False)
    slow = [(method, text) for method in methods for text in REPEATING if usual[method][text] < (args.least or 0)]
    for method, text in slow:
        print(f"{method}, {text}: below {args.least}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        serve(sys.argv[1], json.loads(sys.argv[2]))
    else:
        sys.exit(main())
