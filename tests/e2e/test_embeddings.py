"""Tests embeddings of MiniLM against transformers: attention without a causal mask and without a KV cache."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import prompts
import pytest
import torch
from engine import Result, job, run_engines
from processes import SIM
from server import Server

pytestmark = [pytest.mark.server, pytest.mark.models]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "model-families.md").read_text()
CLOSENESS = 0.9999
"""Smallest allowed cosine similarity between the engine's vector and that of transformers."""
EXACT = 0.999999
"""Smallest allowed cosine similarity in fp32."""
SERVED: dict[str, tuple[dict[str, str], tuple[str, ...], float]] = {
    "cpu": ({}, (), CLOSENESS),
    # The simulated card must compute every operator itself; a fallback to the host is an error.
    "sim": (
        SIM,
        ("--dtype", "float32"),
        EXACT,
    ),
}
"""Environment variables, arguments of the server, and smallest allowed cosine similarity, by device."""

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
    """Returns the vectors of transformers: the mean of the last hidden states, normalized, as in the model card."""
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


def closeness(vectors: Sequence[Sequence[float]], expected: torch.Tensor) -> list[float]:
    """Returns the cosine similarity of each vector with the expected one."""
    ours = torch.tensor(vectors, dtype=torch.float64)
    assert ours.shape == expected.shape == (len(TEXTS), 384)
    return torch.nn.functional.cosine_similarity(ours, expected).tolist()


def test_fp32_embeddings_equal_transformers(results: list[Result], expected: torch.Tensor) -> None:
    assert results[0]["dtype"] == "torch.float32"
    near = closeness(results[0]["embeddings"], expected)
    assert min(near) >= EXACT, near


def test_default_embeddings_equal_transformers(results: list[Result], expected: torch.Tensor) -> None:
    near = closeness(results[1]["embeddings"], expected)
    assert min(near) >= CLOSENESS, (results[1]["dtype"], near)


def test_texts_have_different_vectors(expected: torch.Tensor) -> None:
    """Tests that different texts have a clearly smaller cosine similarity than the tests above require."""
    among = expected @ expected.T - torch.eye(len(TEXTS), dtype=torch.float64)
    assert float(among.max()) < 0.995
    assert float(among[0, 1]) > 0.9 > float(among[0, 2])


@pytest.mark.feature("Model family: encoder-only: embeddings (BERT)", "{device}")
@pytest.mark.feature("Model family: over HTTP: embeddings (/v1/embeddings)", "{device}")
@pytest.mark.usefixtures("minilm")
@pytest.mark.parametrize("device", SERVED)
def test_the_server_embeds(tmp_path: Path, expected: torch.Tensor, device: str) -> None:
    """Tests the server with the command and the request of docs/serve/model-families.md."""
    [command] = re.findall(r"^vllm-backplane serve (minilm)$", PAGE, re.MULTILINE)
    [body] = re.findall(r"^curl -s http://127\.0\.0\.1:8000/v1/embeddings .*\n  -d '(.*)'$", PAGE, re.MULTILINE)
    variables, options, least = SERVED[device]
    with (
        Server(tmp_path, command, "--max-num-seqs", "8", *options, variables=variables) as server,
        server.client() as client,
    ):
        assert f"Operators on device {device}:" in server.text()
        answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=list(TEXTS))
        near = closeness([item.embedding for item in answer.data], expected)
        assert min(near) >= least, near
        request = json.loads(body)
        assert request["input"] == TEXTS[0]
        items = server.http.post("/v1/embeddings", json=request).json()["data"]
        [alone] = torch.tensor([item["embedding"] for item in items], dtype=torch.float64)
        assert float(torch.nn.functional.cosine_similarity(alone, expected[0], dim=0)) >= least
        steps = ["imports", "model", "memory", "weights_begin", "weights", "kv_cache", "warm_up", "ready"]
        assert re.findall(r"Start: step=(\w+) at=\d", server.text()) == steps, "without a terminal, the log has them"
