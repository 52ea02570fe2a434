"""What transformers compute of the models in perceiving.py: the whole sequence anew for every token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import perceiving
import reference
import torch

TOKENS = 12
MARGIN = 1e-2
"""Least lead of any token over the second: far above the rounding of any order of summation."""


class Models(NamedTuple):
    folder: Path
    reranker: Any
    whisper: Any
    extractor: Any
    blip2: Any
    processor: Any


def save(folder: Path) -> Models:
    return Models(
        folder,
        perceiving.reranker(folder / "reranker", seed=2),
        *perceiving.whisper(folder / "whisper", seed=2),
        *perceiving.blip2(folder / "blip2", seed=6),
    )


def different(wanted: list[reference.Continuation]) -> list[reference.Continuation]:
    """Insists that the answers show what was given, and that none is luck."""
    assert len({tuple(one.token_ids) for one in wanted}) == len(wanted), "what is given makes no difference"
    assert min(one.smallest_margin for one in wanted) > MARGIN, "near a tie; change the seed"
    return wanted


def continued(step: Callable[[list[int]], torch.Tensor], ids: list[int]) -> reference.Continuation:
    ids, steps = list(ids), []
    for _ in range(TOKENS):
        steps.append(step(ids))
        ids.append(int(steps[-1].argmax()))
    return reference.continuation(torch.stack(steps))


@torch.inference_mode()
def scores(models: Models, query: str, texts: list[str]) -> list[float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.folder / "reranker")
    pairs = [tokenizer(query, text, return_tensors="pt") for text in texts]
    found = [float(models.reranker(**pair).logits.sigmoid()) for pair in pairs]
    apart = sorted(found)
    least = min(high - low for low, high in pairwise(apart))
    assert least > MARGIN, f"texts score alike; change the seed: {found}"
    return found


@torch.inference_mode()
def of_sound(models: Models, waves: numpy.ndarray) -> reference.Continuation:
    given = models.extractor(waves, sampling_rate=perceiving.RATE, return_tensors="pt")["input_features"]

    def step(ids: list[int]) -> torch.Tensor:
        return models.whisper(input_features=given, decoder_input_ids=torch.tensor([ids])).logits[0, -1]

    return continued(step, perceiving.FIRST)


@torch.inference_mode()
def of_picture(models: Models, picture: Any, text: str) -> reference.Continuation:
    given = models.processor(images=picture, text=text, return_tensors="pt")

    def step(ids: list[int]) -> torch.Tensor:
        return models.blip2(input_ids=torch.tensor([ids]), pixel_values=given["pixel_values"]).logits[0, -1]

    return continued(step, given["input_ids"][0].tolist())
