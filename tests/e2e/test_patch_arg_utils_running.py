"""Tests the patch _set_default_chunked_prefill_and_prefix_caching_args in a running engine.

Arguments from Python must be applied, or refused as on a command line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import batch, greedy, job, require_backplane, try_engines
from transformers import JambaConfig

pytestmark = [pytest.mark.server, pytest.mark.models]


def test_an_engine_runs_with_it(tiny_llama: Path, tmp_path: Path) -> None:
    hybrid = tmp_path / "hybrid"
    JambaConfig(
        architectures=["JambaForCausalLM"], num_hidden_layers=2, hidden_size=64, num_attention_heads=2
    ).save_pretrained(hybrid)
    jobs = [
        job(hybrid, skip_tokenizer_init=True, enable_prefix_caching=True),
        job(tiny_llama, batch([[77, 78, 79]], greedy(4)), async_scheduling=True),
    ]
    (refused, done), log = try_engines(tmp_path, jobs)
    assert "JambaForCausalLM carries a recurrent state" in refused["error"]
    assert "remove --enable-prefix-caching" in refused["error"]
    assert "error" not in done, done["error"]
    require_backplane(done)
    assert done["async_scheduling"] is True
    assert len(done["batches"][0][0]["token_ids"]) == 4
    logged = log.read_text()
    assert "_set_default_chunked_prefill_and_prefix_caching_args applied" in logged
    assert "Scheduling is asynchronous, as requested" in logged
