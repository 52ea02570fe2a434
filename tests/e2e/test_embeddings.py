"""MiniLM through vLLM's pooling API, compared with transformers: attention without causal mask and cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import prompts
import pytest
import torch
from engine import Result, job, run_engines
from server import Server

pytestmark = [pytest.mark.server, pytest.mark.models]

CLOSENESS = 0.9999
"""Least cosine between our vector and transformers'."""

TEXTS = (
    "Paris is the capital of France.",
    "The capital of France is Paris.",
    "A cat sleeps on the warm stove.",
    "x",
    "Zwei Enten schwimmen auf dem See.",
    "def area(r): return 3.14159 * r * r",
    prompts.PASSAGE[:700],
    prompts.PASSAGE[300:1300],
)


@pytest.fixture(scope="module")
def expected(minilm: Path) -> torch.Tensor:
    """Mean of the last hidden states over the text's tokens, of length one: what the model's card says."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32, attn_implementation="eager").eval()
    rows = []
    for text in TEXTS:
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(states.double().mean(0), dim=0))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def results(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    engines = [job(minilm, embed=TEXTS, runner="pooling", dtype=dtype) for dtype in ("float32", "auto")]
    return run_engines(tmp_path_factory.mktemp("embeddings"), engines)


@pytest.fixture(scope="module")
def on_sim(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One engine, on a card that the host cannot touch and that computes every operator itself."""
    variables = {"BACKPLANE_DEVICE": "sim", "BACKPLANE_SIM_FALLBACK": "forbid", "BACKPLANE_SIM_MEMORY": "1GiB"}
    engine = job(minilm, embed=TEXTS, runner="pooling")
    [result] = run_engines(tmp_path_factory.mktemp("sim"), [engine], variables, device="sim")
    return result


def closeness(vectors: Sequence[Sequence[float]], expected: torch.Tensor) -> list[float]:
    ours = torch.tensor(vectors, dtype=torch.float64)
    assert ours.shape == expected.shape == (len(TEXTS), 384)
    return torch.nn.functional.cosine_similarity(ours, expected).tolist()


def test_fp32_embeddings_equal_transformers(results: list[Result], expected: torch.Tensor) -> None:
    assert results[0]["dtype"] == "torch.float32"
    near = closeness(results[0]["embeddings"], expected)
    assert min(near) >= 0.999999, near


@pytest.mark.feature("Model family: encoder-only: embeddings (BERT)", "sim")
def test_embeddings_of_another_device_equal_transformers(on_sim: Result, expected: torch.Tensor) -> None:
    assert on_sim["dtype"] == "torch.float32"
    near = closeness(on_sim["embeddings"], expected)
    assert min(near) >= 0.999999, near


def test_default_embeddings_equal_transformers(results: list[Result], expected: torch.Tensor) -> None:
    near = closeness(results[1]["embeddings"], expected)
    assert min(near) >= CLOSENESS, (results[1]["dtype"], near)


def test_texts_are_told_apart(expected: torch.Tensor) -> None:
    """A cosine near one says something only if other texts are not that near."""
    among = expected @ expected.T - torch.eye(len(TEXTS), dtype=torch.float64)
    assert float(among.max()) < 0.995
    assert float(among[0, 1]) > 0.9 > float(among[0, 2])


@pytest.mark.feature("Model family: encoder-only: embeddings (BERT)", "cpu")
def test_the_server_embeds(minilm: Path, tmp_path: Path, expected: torch.Tensor) -> None:
    with Server(tmp_path, "minilm", "--max-num-seqs", "8") as server, server.client() as client:
        answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=list(TEXTS))
        near = closeness([item.embedding for item in answer.data], expected)
        assert min(near) >= CLOSENESS, near
        assert "Operators on device cpu" in server.text()
