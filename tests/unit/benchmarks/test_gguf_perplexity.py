"""The stored GGUF perplexities cover every served type and agree with llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_backplane.gguf.decoding import SERVED

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "gguf-perplexity.json"
FORMATS = json.loads(RESULTS.read_text())["formats"]


def test_every_type_that_is_served_is_in_a_file_that_was_measured() -> None:
    assert {kind.name for kind in SERVED} <= {kind for found in FORMATS.values() for kind in found["types"]}


@pytest.mark.parametrize("name", FORMATS)
def test_ours_is_llama_cpps_within_a_hundredth(name: str) -> None:
    assert FORMATS[name]["ours"] == pytest.approx(FORMATS[name]["llama.cpp"], rel=0.01)


def test_files_in_half_precision_were_served_in_it() -> None:
    """Files in half precision are measured in it, as `vllm serve` serves them, and quantized files in float32."""
    halves = {"F16": "float16", "BF16": "bfloat16"}
    for name, found in FORMATS.items():
        assert found["dtype"] == halves.get(name, "float32"), name
