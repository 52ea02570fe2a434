"""Tests the fp8 KV cache on each device: it takes one byte per number, and outputs stay near the unquantized ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine import batch, greedy, job, run_engines
from processes import SIM

pytestmark = [pytest.mark.server, pytest.mark.models]

PROMPT = [(37 * place * place + 11 * place) % 40000 + 10 for place in range(200)]
STORED = 16 << 20

TOLERANCES = {"fp8": (0.035, 0.2), "fp8_e5m2": (0.06, 0.7)}
"""Limits of the mean and the largest absolute difference of log-probabilities: about twice what was measured."""
ENGINES = {"cpu": (["auto", *TOLERANCES], {}), "sim": (["fp8"], SIM)}
"""Types of the KV cache and environment variables, by device. The unquantized results are those of cpu."""
CASES = [(device, name) for device, (types, _) in ENGINES.items() for name in types if name in TOLERANCES]

Results = dict[tuple[str, str], tuple[list[float], int]]


@pytest.fixture(scope="module")
def results(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns the log-probabilities of the prompt and the capacity of the KV cache in tokens, by device and type."""
    # The prefill has several chunks, and all but the first read earlier keys and values from the KV cache.
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "kv_cache_memory_bytes": STORED}
    work = batch([PROMPT], greedy(8, prompt_logprobs=0))
    found: Results = {}
    for device, (types, variables) in ENGINES.items():
        folder = tmp_path_factory.mktemp(device)
        engines = [job(tiny_llama, work, kv_cache_dtype=name, **limits) for name in types]
        done = run_engines(folder, engines, variables, device=device)
        sizes = re.findall(r"KV cache size: ([\d,]+) tokens", (folder / "engine.log").read_text())
        for name, result, size in zip(types, done, sizes, strict=True):
            probabilities = result["batches"][0][0]["prompt_logprobs"][1:]
            found[device, name] = (probabilities, int(size.replace(",", "")))
    return found


@pytest.mark.feature("KV cache: fp8", "{device}")
@pytest.mark.parametrize(("device", "name"), CASES)
def test_fp8_stays_near_auto(results: Results, device: str, name: str) -> None:
    pairs = zip(results[device, name][0], results["cpu", "auto"][0], strict=True)
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    mean, largest = sum(differences) / len(differences), max(differences)
    print(f"mean {mean:.4f}, largest {largest:.4f}")
    assert mean > 1e-3, "the KV cache must be quantized"
    assert mean < TOLERANCES[name][0], f"mean {mean:.4f}, largest {largest:.4f}"
    assert largest < TOLERANCES[name][1], f"mean {mean:.4f}, largest {largest:.4f}"


@pytest.mark.parametrize(("device", "name"), CASES)
def test_a_token_takes_a_byte_instead_of_four(results: Results, device: str, name: str) -> None:
    assert results[device, name][1] == 4 * results["cpu", "auto"][1]
