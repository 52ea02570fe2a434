"""An fp8 KV cache runs, takes a byte per number, and stays near one that is not quantized, on each device."""

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
SIM = {"BACKPLANE_DEVICE": "sim", "BACKPLANE_SIM_FALLBACK": "forbid", "BACKPLANE_SIM_MEMORY": "1GiB"}
ENGINES = {"cpu": (["auto", *TOLERANCES], {}), "sim": (["fp8"], SIM)}
"""Types of the cache and variables, by device. What is not quantized is taken from the first."""
CASES = [(device, name) for device, (types, _) in ENGINES.items() for name in types if name in TOLERANCES]

Results = dict[tuple[str, str], tuple[list[float], int]]


@pytest.fixture(scope="module")
def results(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Log-probabilities of the prompt, and tokens that the cache holds, by device and type."""
    # In pieces, so that all but the first read the cache rather than what was just computed.
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
    assert mean > 1e-3, "nothing was rounded"
    assert mean < TOLERANCES[name][0], f"mean {mean:.4f}, largest {largest:.4f}"
    assert largest < TOLERANCES[name][1], f"mean {mean:.4f}, largest {largest:.4f}"


@pytest.mark.parametrize(("device", "name"), CASES)
def test_a_token_takes_a_byte_instead_of_four(results: Results, device: str, name: str) -> None:
    assert results[device, name][1] == 4 * results["cpu", "auto"][1]
