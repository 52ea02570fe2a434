"""What Hugging Face transformers computes, in float32: the independent answer that engines are compared with."""

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


def _continue(step: Any, tokens: int) -> Continuation:
    ids, logprobs, margin = [], [], float("inf")
    for _ in range(tokens):
        scores = torch.log_softmax(step(ids).double(), dim=-1)
        (first, second), (token, _) = (part.tolist() for part in scores.topk(2))
        margin = min(margin, first - second)
        ids.append(token)
        logprobs.append(first)
    return Continuation(ids, logprobs, margin)


@torch.inference_mode()
def continue_with_cache(model: Any, prompt: Sequence[int], tokens: int) -> Continuation:
    """Greedy, token by token, with transformers' KV cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)

    def step(ids: list[int]) -> torch.Tensor:
        fed = torch.tensor([ids[-1:] or list(prompt)])
        return model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]

    return _continue(step, tokens)


@torch.inference_mode()
def continue_without_cache(model: Any, prompt: Sequence[int], tokens: int) -> Continuation:
    """Greedy, with the whole sequence computed anew for every token: slow, and nothing to get wrong."""

    def step(ids: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, -1]

    return _continue(step, tokens)


@torch.inference_mode()
def prompt_logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    """Log-probability of every token but the first, given those before it."""
    scores = torch.log_softmax(model(input_ids=torch.tensor([list(ids)])).logits[0].double(), dim=-1)
    following = torch.tensor(list(ids)[1:])
    return scores[:-1].gather(1, following[:, None])[:, 0].tolist()
