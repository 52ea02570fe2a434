"""Tests a tiny Whisper in an engine on each device: tokens and log-probabilities equal those of transformers.

test_served_families.py tests it over HTTP, where the route returns no log-probabilities, together with other models
that have more inputs than a text.
"""

from __future__ import annotations

from pathlib import Path

import multimodal_models
import multimodal_reference
import pytest
from engine import batch, greedy, job, run_engines
from multimodal_reference import TOKENS, Models
from test_architectures import DEVICES, LOGPROB_TOLERANCE

pytestmark = pytest.mark.server

SOUNDS = [1, 2, 3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return multimodal_reference.save(tmp_path_factory.mktemp("multimodal"))


@pytest.mark.feature("Model family: encoder-decoder", "{device}")
@pytest.mark.parametrize("device", DEVICES)
def test_sound(models: Models, tmp_path: Path, device: str) -> None:
    sounds = batch([multimodal_models.FIRST] * len(SOUNDS), greedy(TOKENS, logprobs=0)) | {"sounds": SOUNDS}
    work = job(models.folder / "whisper", sounds, max_model_len=64, skip_tokenizer_init=False)
    [result] = run_engines(tmp_path, [work], DEVICES[device], device=device)
    found = [multimodal_reference.of_sound(models, multimodal_models.sound(number)) for number in SOUNDS]
    for output, expected in zip(result["batches"][0], multimodal_reference.require_distinct(found), strict=True):
        assert output["token_ids"] == expected.token_ids
        assert output["logprobs"] == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
