"""An fp8 KV cache runs, takes a byte per number, and stays near one that is not quantized."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine import batch, greedy, job, run_engines

pytestmark = [pytest.mark.server, pytest.mark.models]

PROMPT = [(37 * place * place + 11 * place) % 40000 + 10 for place in range(200)]
STORED = 16 << 20

TOLERANCES = {"fp8": (0.035, 0.2), "fp8_e5m2": (0.06, 0.7)}
"""(mean, largest) absolute difference of log-probabilities: about twice what is measured."""


@pytest.fixture(scope="module")
def results(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], int]]:
    """Log-probabilities of the prompt, and tokens that the cache holds, by its type."""
    folder = tmp_path_factory.mktemp("fp8")
    # In pieces, so that all but the first read the cache rather than what was just computed.
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "kv_cache_memory_bytes": STORED}
    work = batch([PROMPT], greedy(8, prompt_logprobs=0))
    types = ["auto", *TOLERANCES]
    done = run_engines(folder, [job(tiny_llama, work, kv_cache_dtype=name, **limits) for name in types])
    sizes = re.findall(r"KV cache size: ([\d,]+) tokens", (folder / "engine.log").read_text())
    return {
        name: (result["batches"][0][0]["prompt_logprobs"][1:], int(size.replace(",", "")))
        for name, result, size in zip(types, done, sizes, strict=True)
    }


@pytest.mark.feature("KV cache: fp8", "cpu")
@pytest.mark.parametrize("name", TOLERANCES)
def test_fp8_stays_near_auto(results: dict[str, tuple[list[float], int]], name: str) -> None:
    pairs = zip(results[name][0], results["auto"][0], strict=True)
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    mean, largest = sum(differences) / len(differences), max(differences)
    print(f"mean {mean:.4f}, largest {largest:.4f}")
    assert mean > 1e-3, "nothing was rounded"
    assert mean < TOLERANCES[name][0], f"mean {mean:.4f}, largest {largest:.4f}"
    assert largest < TOLERANCES[name][1], f"mean {mean:.4f}, largest {largest:.4f}"


@pytest.mark.parametrize("name", TOLERANCES)
def test_a_token_takes_a_byte_instead_of_four(results: dict[str, tuple[list[float], int]], name: str) -> None:
    assert results[name][1] == 4 * results["auto"][1]
