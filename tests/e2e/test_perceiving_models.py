"""Models that read more than a prompt: a reranker pairs of texts, Whisper sound, BLIP-2 pictures; as transformers do.

Tiny, with random weights, on each device; one process runs a device's engines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import perceiving
import pytest
import reference
import torch
from engine import Result, batch, greedy, job, run_engines
from test_architectures import DEVICES, LOGPROB_TOLERANCE, MARGIN

pytestmark = pytest.mark.server

TOKENS = 12
QUERY, TEXTS = "who sleeps?", ["a cat sleeps on the stove.", "x", "ducks swim in the lake, do they?"]
SOUNDS, START = [1, 2, 3], 511
PICTURES, QUESTIONS = [1, 2, 2], ["what is this?", "what is this?", "how many cats do you see, and where?"]


class Models(NamedTuple):
    folder: Path
    reranker: Any
    whisper: Any
    extractor: Any
    blip2: Any
    processor: Any

    def question(self, text: str) -> list[int]:
        return list(self.processor.tokenizer(text)["input_ids"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("perceiving")
    return Models(
        folder,
        perceiving.reranker(folder / "reranker", seed=2),
        *perceiving.whisper(folder / "whisper", seed=2),
        *perceiving.blip2(folder / "blip2", seed=6),
    )


@pytest.fixture(scope="module")
def results(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Result]]:
    sampling = greedy(TOKENS, logprobs=0)
    heard = batch([[START]] * len(SOUNDS), sampling) | {"sounds": SOUNDS}
    seen = batch([models.question(text) for text in QUESTIONS], sampling) | {"pictures": PICTURES}
    jobs = [
        job(models.folder / "reranker", steps=[{"score": [QUERY, TEXTS]}], runner="pooling"),
        job(models.folder / "whisper", heard, max_model_len=64),
        job(models.folder / "blip2", seen, max_model_len=128),
    ]

    @cache
    def run(device: str) -> list[Result]:
        return run_engines(tmp_path_factory.mktemp(device), jobs, DEVICES[device], device=device)

    return run


def continued(step: Callable[[list[int]], torch.Tensor], ids: list[int]) -> reference.Continuation:
    """Greedy, with everything computed anew for every token."""
    ids, steps = list(ids), []
    for _ in range(TOKENS):
        steps.append(step(ids))
        ids.append(int(steps[-1].argmax()))
    return reference.continuation(torch.stack(steps))


@torch.inference_mode()
def of_sound(models: Models, number: int) -> reference.Continuation:
    waves = perceiving.sound(number)
    given = models.extractor(waves, sampling_rate=perceiving.RATE, return_tensors="pt")["input_features"]

    def step(ids: list[int]) -> torch.Tensor:
        return models.whisper(input_features=given, decoder_input_ids=torch.tensor([ids])).logits[0, -1]

    return continued(step, [START])


@torch.inference_mode()
def of_picture(models: Models, number: int, text: str) -> reference.Continuation:
    given = models.processor(images=perceiving.picture(number), text=text, return_tensors="pt")

    def step(ids: list[int]) -> torch.Tensor:
        return models.blip2(input_ids=torch.tensor([ids]), pixel_values=given["pixel_values"]).logits[0, -1]

    return continued(step, given["input_ids"][0].tolist())


def compare(outputs: list[dict[str, Any]], wanted: list[reference.Continuation]) -> None:
    assert len({tuple(one.token_ids) for one in wanted}) == len(wanted), "what is given makes no difference"
    for output, expected in zip(outputs, wanted, strict=True):
        assert expected.smallest_margin > MARGIN, "near a tie; change the seed"
        assert output["token_ids"] == expected.token_ids
        assert output["logprobs"] == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.feature("Model family: encoder-only: a reranker", "{device}")
@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_a_reranker(models: Models, results: Callable[[str], list[Result]], device: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.folder / "reranker")
    pairs = [tokenizer(QUERY, text, return_tensors="pt") for text in TEXTS]
    wanted = [float(models.reranker(**pair).logits.sigmoid()) for pair in pairs]
    assert max(wanted) - min(wanted) > 0.02, "all texts score alike; change the seed"
    assert results(device)[0]["steps"][0] == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)


@pytest.mark.feature("Model family: encoder-decoder", "{device}")
@pytest.mark.parametrize("device", DEVICES)
def test_sound(models: Models, results: Callable[[str], list[Result]], device: str) -> None:
    compare(results(device)[1]["batches"][0], [of_sound(models, number) for number in SOUNDS])


@pytest.mark.feature("Model family: vision and language", "{device}")
@pytest.mark.parametrize("device", DEVICES)
def test_pictures(models: Models, results: Callable[[str], list[Result]], device: str) -> None:
    wanted = [of_picture(models, number, text) for number, text in zip(PICTURES, QUESTIONS, strict=True)]
    compare(results(device)[2]["batches"][0], wanted)
