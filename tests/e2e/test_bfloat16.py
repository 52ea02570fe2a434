"""Tests that bf16 log-probabilities stay near those of fp32 transformers, with and without BF16 instructions."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import prompts
import pytest
import reference
from engine import Result, batch, greedy, job, run_engines

pytestmark = [pytest.mark.server, pytest.mark.models]

MEAN_TOLERANCE = 0.07
MAX_TOLERANCE = 0.5
"""Limits of the mean and the largest absolute difference of log-probabilities: about twice what was measured."""


def ways() -> list[object]:
    """Returns the environments of the engines: unchanged, and without BF16 instructions in oneDNN if an x86 processor
    has some."""
    found = [pytest.param({}, id="as the processor is")]
    if platform.machine() == "x86_64" and re.search(r"avx512_bf16|amx_bf16", Path("/proc/cpuinfo").read_text()):
        without = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
        found.append(pytest.param(without, id="without BF16 instructions"))
    return list(found)


@pytest.fixture(scope="module")
def text(smollm2: Path) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(smollm2).encode(prompts.PASSAGE)
    assert len(ids) > 400
    return ids


@pytest.fixture(scope="module")
def expected(smollm2: Path, text: list[int]) -> list[float]:
    return reference.prompt_logprobs(reference.load(smollm2), text)


@pytest.fixture(scope="module", params=ways())
def result(
    request: pytest.FixtureRequest, smollm2: Path, text: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Result:
    work = batch([text], greedy(16, prompt_logprobs=0, logprobs=0))
    engine = job(smollm2, work, max_model_len=1024, max_num_batched_tokens=1024, dtype="bfloat16")
    (done,) = run_engines(tmp_path_factory.mktemp("bfloat16"), [engine], request.param)
    return done


def test_it_ran_in_bfloat16(result: Result) -> None:
    assert result["dtype"] == "torch.bfloat16"


def test_logprobs_stay_near_fp32(result: Result, expected: list[float]) -> None:
    first, *logprobs = result["batches"][0][0]["prompt_logprobs"]
    assert first is None
    differences = [abs(ours - theirs) for ours, theirs in zip(logprobs, expected, strict=True)]
    mean, largest = sum(differences) / len(differences), max(differences)
    print(f"mean {mean:.4f}, largest {largest:.4f}")
    assert mean < MEAN_TOLERANCE, f"mean {mean:.4f}, largest {largest:.4f}"
    assert largest < MAX_TOLERANCE, f"mean {mean:.4f}, largest {largest:.4f}"


def test_bf16_really_rounds(result: Result, expected: list[float]) -> None:
    """Tests that log-probabilities differ from those of fp32; otherwise the engine did not compute in bf16."""
    logprobs = result["batches"][0][0]["prompt_logprobs"][1:]
    assert max(abs(ours - theirs) for ours, theirs in zip(logprobs, expected, strict=True)) > 1e-3
