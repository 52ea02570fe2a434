"""The README's example: a vendor's wheel, of which this repository knows nothing, carries vLLM."""

from __future__ import annotations

from pathlib import Path

import example_packages
import pytest
import reference
from engine import batch, greedy, job, run_engines
from processes import on_path

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 24
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1100)), [40000]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_packages.install("minimal_device", tmp_path_factory)


def test_it_has_at_most_thirty_lines() -> None:
    assert len((example_packages.EXAMPLES / "minimal_device" / "minimal_device.py").read_text().splitlines()) <= 30


def test_it_gives_the_tokens_of_transformers(installed: Path, tiny_llama: Path, tmp_path: Path) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
    work = job(tiny_llama, batch(PROMPTS, greedy(TOKENS)), **limits)
    chosen = {"PYTHONPATH": on_path(installed), "BACKPLANE_DEVICE": "minimal"}
    (minimal,) = run_engines(tmp_path, [work], chosen, device="minimal")
    model = reference.load(tiny_llama)
    expected = [reference.continue_without_cache(model, ids, TOKENS) for ids in PROMPTS]
    assert min(answer.smallest_margin for answer in expected) > 1e-3, "near a tie; change the prompts"
    answers = [output["token_ids"] for output in minimal["batches"][0]]
    assert answers == [answer.token_ids for answer in expected]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
