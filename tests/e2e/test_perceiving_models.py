"""An encoder-decoder in one process, with the log-probabilities that its route over HTTP does not tell.

Tiny Whisper with random weights, on each device. Over HTTP it is in test_served_families.py, with other models that
read more than a prompt.
"""

from __future__ import annotations

from pathlib import Path

import perceiving
import perceiving_reference
import pytest
from engine import batch, greedy, job, run_engines
from perceiving_reference import TOKENS, Models
from test_architectures import DEVICES, LOGPROB_TOLERANCE

pytestmark = pytest.mark.server

SOUNDS = [1, 2, 3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return perceiving_reference.save(tmp_path_factory.mktemp("perceiving"))


@pytest.mark.feature("Model family: encoder-decoder", "{device}")
@pytest.mark.parametrize("device", DEVICES)
def test_sound(models: Models, tmp_path: Path, device: str) -> None:
    heard = batch([perceiving.FIRST] * len(SOUNDS), greedy(TOKENS, logprobs=0)) | {"sounds": SOUNDS}
    work = job(models.folder / "whisper", heard, max_model_len=64)
    [result] = run_engines(tmp_path, [work], DEVICES[device], device=device)
    wanted = [perceiving_reference.of_sound(models, perceiving.sound(number)) for number in SOUNDS]
    for output, expected in zip(result["batches"][0], perceiving_reference.different(wanted), strict=True):
        assert output["token_ids"] == expected.token_ids
        assert output["logprobs"] == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
