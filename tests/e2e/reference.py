"""Computes reference outputs with Hugging Face transformers in float32, for comparison with engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Continuation:
    """Holds the output for one prompt."""

    token_ids: list[int]
    logprobs: list[float]
    smallest_margin: float
    """Smallest difference of log-probabilities between the two most likely tokens of any step. A small value means that
    the output is near a tie, so rounding may change it."""


def load(folder: Path) -> Any:
    """Loads a causal language model in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def continue_together(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[Continuation]:
    """Continues prompts in one batch by greedy decoding, with the KV cache of transformers and padding on the left."""
    from transformers import DynamicCache

    longest = max(map(len, prompts))
    fed = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    cache = DynamicCache(config=model.config)
    steps: list[torch.Tensor] = []
    for _ in range(tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -fed.shape[1] :]
        output = model(
            input_ids=fed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        steps.append(output.logits[:, -1])
        fed = steps[-1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
    return [continuation(row) for row in torch.stack(steps, dim=1)]


@torch.inference_mode()
def continue_without_cache(model: Any, prompt: Sequence[int], tokens: int) -> Continuation:
    """Continues a prompt by greedy decoding, computing the whole sequence for every token: slow, but simple."""
    ids, steps = list(prompt), []
    for _ in range(tokens):
        steps.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
        ids.append(int(steps[-1].argmax()))
    return continuation(torch.stack(steps))


def require_no_tie(folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Fails if the output of any prompt is near a tie.

    Tests that compare engines with each other need this. The composition of batches depends on timing and changes the
    order of summation, which may change an output that is near a tie.
    """
    margins = [one.smallest_margin for one in continue_together(load(folder), prompts, tokens)]
    assert min(margins) > 1e-3, f"near a tie, where rounding may change tokens; change the prompts: {margins}"


def continuation(logits: torch.Tensor) -> Continuation:
    """Returns the continuation of greedy decoding from the logits of each step."""
    best, ids = torch.log_softmax(logits.double(), dim=-1).topk(2)
    return Continuation(ids[:, 0].tolist(), best[:, 0].tolist(), float((best[:, 0] - best[:, 1]).min()))


@torch.inference_mode()
def prompt_logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    """Returns the log-probability of every token except the first, given the tokens before it."""
    scores = torch.log_softmax(model(input_ids=torch.tensor([list(ids)])).logits[0].double(), dim=-1)
    following = torch.tensor(list(ids)[1:])
    return scores[:-1].gather(1, following[:, None])[:, 0].tolist()
