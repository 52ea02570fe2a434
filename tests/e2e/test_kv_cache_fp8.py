"""An fp8 KV cache runs, halves (against bf16) the bytes of a token, and stays near the unquantized one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine import batch, greedy, job, run_engines

pytestmark = [pytest.mark.server, pytest.mark.models]

PROMPT = [(37 * place * place + 11 * place) % 40000 + 10 for place in range(200)]
MEAN_TOLERANCE = 0.1
MAX_TOLERANCE = 0.5
"""Of the absolute difference of log-probabilities: about twice what is measured."""
STORED = 16 << 20


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_fp8_stays_near_auto(dtype: str, tiny_llama: Path, tmp_path: Path) -> None:
    # In pieces, so that all but the first read the cache rather than what was just computed.
    work = batch([PROMPT], greedy(8, prompt_logprobs=0))
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "kv_cache_memory_bytes": STORED}
    engines = [job(tiny_llama, work, **limits), job(tiny_llama, work, kv_cache_dtype=dtype, **limits)]
    auto, quantized = run_engines(tmp_path, engines)
    pairs = zip(
        auto["batches"][0][0]["prompt_logprobs"][1:],
        quantized["batches"][0][0]["prompt_logprobs"][1:],
        strict=True,
    )
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    mean, largest = sum(differences) / len(differences), max(differences)
    print(f"mean {mean:.4f}, largest {largest:.4f}")
    assert 1e-4 < mean < MEAN_TOLERANCE, f"mean {mean:.4f}, largest {largest:.4f}"
    assert largest < MAX_TOLERANCE, f"mean {mean:.4f}, largest {largest:.4f}"
    sizes = re.findall(r"KV cache size: ([\d,]+) tokens", (tmp_path / "engine.log").read_text())
    plain, small = (int(size.replace(",", "")) for size in sizes)
    assert small == 4 * plain, "one byte instead of the four of a float32"
