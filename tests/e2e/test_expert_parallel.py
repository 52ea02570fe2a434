"""Experts of a mixture divided among two workers, whole ones to each, give transformers' tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
from architectures import ARCHITECTURES
from engine import batch, greedy, insist_on_backplane, job, try_engines
from processes import tail

pytestmark = pytest.mark.server

TOKENS = 16
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)], [9, 8, 7], [311]]
VARIABLES = {"BACKPLANE_SIM_FALLBACK": "forbid", "BACKPLANE_SIM_MEMORY": "1GiB"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder, and transformers' answers."""
    folder = tmp_path_factory.mktemp("mixtral")
    built = ARCHITECTURES["Mixtral: two experts of four"].save(folder)
    answers = [reference.continue_without_cache(built, prompt, TOKENS) for prompt in PROMPTS]
    assert min(answer.smallest_margin for answer in answers) > 1e-3, "near a tie; change the prompts"
    return folder, [answer.token_ids for answer in answers]


@pytest.mark.feature("Parallel: experts", "{device}")
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_tokens_are_those_of_transformers(device: str, model: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = model
    two = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "skip_tokenizer_init": True}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    work = [job(folder, batch(PROMPTS, greedy(TOKENS)), **two, **limits)]
    [done], log = try_engines(tmp_path, work, {"BACKPLANE_DEVICE": device, **VARIABLES})
    assert "error" not in done, done["error"] + tail(log)
    insist_on_backplane(done)
    told = log.read_text(errors="replace")
    assert told.count(f"Operators on device {device}:") == 2
    assert "Local/global number of experts: 2/4" in told
    assert [output["token_ids"] for output in done["batches"][0]] == expected
