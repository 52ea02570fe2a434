"""What Hugging Face transformers computes, in float32: the answer that engines are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Continuation:
    token_ids: list[int]
    logprobs: list[float]
    smallest_margin: float
    """Between the two most likely tokens of any step: how near the continuation came to a tie."""


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def continue_together(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[Continuation]:
    """Greedy, token by token, with transformers' KV cache; shorter prompts are padded on the left."""
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
    """Greedy, with the whole sequence computed anew for every token: slow, and nothing to get wrong."""
    ids, steps = list(prompt), []
    for _ in range(tokens):
        steps.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
        ids.append(int(steps[-1].argmax()))
    return continuation(torch.stack(steps))


def insist_on_no_tie(folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """For tests that compare engines with each other: requests share steps as they happen to arrive, sums come in
    another order, and an answer near a tie may be another one."""
    margins = [one.smallest_margin for one in continue_together(load(folder), prompts, tokens)]
    assert min(margins) > 1e-3, f"near a tie, so equal tokens are luck; change the prompts: {margins}"


def continuation(logits: torch.Tensor) -> Continuation:
    """From the logits of each step."""
    best, ids = torch.log_softmax(logits.double(), dim=-1).topk(2)
    return Continuation(ids[:, 0].tolist(), best[:, 0].tolist(), float((best[:, 0] - best[:, 1]).min()))


@torch.inference_mode()
def prompt_logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    """Log-probability of every token but the first, given those before it."""
    scores = torch.log_softmax(model(input_ids=torch.tensor([list(ids)])).logits[0].double(), dim=-1)
    following = torch.tensor(list(ids)[1:])
    return scores[:-1].gather(1, following[:, None])[:, 0].tolist()
