"""Computes the expected outputs of the models in multimodal_models.py with transformers.

It decodes greedily without a KV cache: every token is computed from the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import multimodal_models
import numpy
import reference
import torch

TOKENS = 12
MARGIN = 1e-2
"""Smallest allowed difference between the two most likely tokens, far above any rounding error."""


class Models(NamedTuple):
    """Holds the transformers models and their processors, with the folder of their checkpoints."""

    folder: Path
    reranker: Any
    whisper: Any
    extractor: Any
    blip2: Any
    processor: Any


def save(folder: Path) -> Models:
    """Saves all models below `folder`, and returns them."""
    return Models(
        folder,
        multimodal_models.reranker(folder / "reranker", seed=2),
        *multimodal_models.whisper(folder / "whisper", seed=2),
        *multimodal_models.blip2(folder / "blip2", seed=6),
    )


def require_distinct(expected: list[reference.Continuation]) -> list[reference.Continuation]:
    """Returns the expected outputs; fails unless they differ from each other and none is near a tie."""
    assert len({tuple(one.token_ids) for one in expected}) == len(expected), "the outputs must depend on the input"
    assert min(one.smallest_margin for one in expected) > MARGIN, "near a tie; change the seed"
    return expected


def continued(step: Callable[[list[int]], torch.Tensor], ids: list[int]) -> reference.Continuation:
    """Continues `ids` by greedy decoding; `step` returns the logits of the next token."""
    ids, steps = list(ids), []
    for _ in range(TOKENS):
        steps.append(step(ids))
        ids.append(int(steps[-1].argmax()))
    return reference.continuation(torch.stack(steps))


@torch.inference_mode()
def scores(models: Models, query: str, texts: list[str]) -> list[float]:
    """Returns the reranker's scores of the texts, which must be clearly different."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.folder / "reranker")
    pairs = [tokenizer(query, text, return_tensors="pt") for text in texts]
    found = [float(models.reranker(**pair).logits.sigmoid()) for pair in pairs]
    least = min(high - low for low, high in pairwise(sorted(found)))
    assert least > MARGIN, f"two texts have nearly the same score; change the seed: {found}"
    return found


@torch.inference_mode()
def of_sound(models: Models, samples: numpy.ndarray) -> reference.Continuation:
    """Returns Whisper's output for a sound."""
    features = models.extractor(samples, sampling_rate=multimodal_models.RATE, return_tensors="pt")["input_features"]

    def step(ids: list[int]) -> torch.Tensor:
        return models.whisper(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[0, -1]

    return continued(step, multimodal_models.FIRST)


@torch.inference_mode()
def of_picture(models: Models, picture: Any, text: str) -> reference.Continuation:
    """Returns BLIP-2's output for a picture and a text."""
    given = models.processor(images=picture, text=text, return_tensors="pt")

    def step(ids: list[int]) -> torch.Tensor:
        return models.blip2(input_ids=torch.tensor([ids]), pixel_values=given["pixel_values"]).logits[0, -1]

    return continued(step, given["input_ids"][0].tolist())
