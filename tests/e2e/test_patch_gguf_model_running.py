"""Tests the patch maybe_override_with_speculators in a running engine.

The path of a GGUF file must be accepted as a model, and the engine must use the dtype of its matrices.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf_models
import pytest
import reference
from engine import batch, greedy, job, require_backplane, try_engines

pytestmark = pytest.mark.server

PROMPT = [(17 * place + place * place) % 500 + 5 for place in range(20)]


def test_an_engine_runs_with_it(tmp_path: Path) -> None:
    path = tmp_path / "mistral.gguf"
    model = replace(gguf_models.MISTRAL, types=(gguf_models.Type.F16,)).write(path)
    work = batch([PROMPT], greedy(4, logprobs=0))
    engine_job = job(path, work, skip_tokenizer_init=True, max_num_batched_tokens=64, dtype="auto")
    (result,), log = try_engines(tmp_path, [engine_job], {"BACKPLANE_CACHE": str(tmp_path / "cache")})
    assert "error" not in result, result["error"]
    require_backplane(result)
    assert result["dtype"] == "torch.float16", "this is the type of the matrices in the file"
    assert re.search(r"\bmaybe_override_with_speculators applied\b", log.read_text())
    (output,) = result["batches"][0]
    expected = reference.prompt_logprobs(model, [*PROMPT, *output["token_ids"]])[len(PROMPT) - 1 :]
    assert output["logprobs"] == pytest.approx(expected, abs=0.02)
