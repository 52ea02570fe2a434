"""Tests embeddings of MiniLM against transformers: attention without a causal mask and without a KV cache."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import prompts
import pytest
import torch
from browser import Browser, needs_browser
from engine import Result, job, run_engines
from processes import SIM, Child
from server import Server

pytestmark = [pytest.mark.server, pytest.mark.models]

PAGES = Path(__file__).resolve().parents[2] / "docs" / "serve"
PAGE = (PAGES / "model-families.md").read_text()
DOCUMENTS = (PAGES / "long-documents.md").read_text()
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


@pytest.fixture(scope="module", params=SERVED)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(device: str, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs the server with the commands of docs/serve/model-families.md and docs/serve/long-documents.md."""
    [command] = re.findall(r"^vllm-backplane serve (minilm)$", PAGE, re.MULTILINE)
    [plugin] = re.findall(r"^vllm-backplane serve minilm (--io-processor-plugin \w+)$", DOCUMENTS, re.MULTILINE)
    variables, options, _least = SERVED[device]
    folder = tmp_path_factory.mktemp("embedding-server")
    with Server(folder, command, *plugin.split(), "--max-num-seqs", "8", *options, variables=variables) as server:
        yield server


@needs_browser
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_the_page_lists_the_requests_of_a_model_without_chat(server: Server, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(server.address + "/")
        browser.wait(lambda: browser.text("#connection") == "connected", "the page is connected")
        assert not browser.is_shown("#chat")
        assert browser.is_shown("#no-chat")
        shown = browser.run("return [...document.querySelectorAll('#endpoints li')].map(each => each.textContent)")
        assert {"/v1/embeddings", "/pooling"} <= set(shown)
        assert "/v1/chat/completions" not in shown
        assert browser.errors() == []


@pytest.mark.feature("Model family: encoder-only: embeddings (BERT)", "{device}")
@pytest.mark.feature("Model family: over HTTP: embeddings (/v1/embeddings)", "{device}")
def test_the_server_embeds(server: Server, expected: torch.Tensor, device: str) -> None:
    """Tests the request of docs/serve/model-families.md."""
    [body] = re.findall(r"^curl -s http://127\.0\.0\.1:8000/v1/embeddings .*\n  -d '(.*)'$", PAGE, re.MULTILINE)
    least = SERVED[device][2]
    assert f"Operators on device {device}:" in server.text()
    with server.client() as client:
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


def pool(server: Server, **data: Any) -> httpx.Response:
    return server.http.post("/pooling", json={"model": "all-MiniLM-L6-v2", "data": data})


LONG = " ".join(f"Paragraph {number}. {prompts.PASSAGE.strip()}" for number in range(4))
NEEDLE = "Leaves turn sunlight, water and carbon dioxide into sugar and oxygen."


@pytest.mark.feature("Model family: over HTTP: long documents (IO processor, /pooling)", "{device}")
def test_a_document_that_fits_has_the_vector_of_its_text(server: Server, expected: torch.Tensor, device: str) -> None:
    answer = pool(server, documents=list(TEXTS)).json()["data"]
    assert [len(item["passages"]) for item in answer["data"]] == [1] * len(TEXTS)
    near = closeness([item["embedding"] for item in answer["data"]], expected)
    assert min(near) >= SERVED[device][2], near


@pytest.mark.feature("Model family: over HTTP: long documents (IO processor, /pooling)", "{device}")
@pytest.mark.usefixtures("device")
def test_the_vector_of_a_long_document_is_the_weighted_mean_of_its_passages(server: Server, minilm: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokens = len(tokenizer(LONG, add_special_tokens=False, verbose=False)["input_ids"])
    [model] = server.http.get("/v1/models").json()["data"]
    whole = model["max_model_len"] - 2  # without the special tokens at both ends
    assert tokens > 2 * whole
    answer = pool(server, documents=["x", LONG], passage_embeddings=True).json()["data"]
    [_short, item] = answer["data"]
    passages = item["passages"]
    assert len(passages) >= 3
    assert passages[0]["start"] == 0 and passages[-1]["end"] == len(LONG)
    overlap = whole // 8
    assert sum(passage["tokens"] for passage in passages) == tokens + overlap * (len(passages) - 1)
    assert all(first["end"] > second["start"] for first, second in itertools.pairwise(passages))
    rows = torch.tensor([passage["embedding"] for passage in passages])
    weights = torch.tensor([float(passage["tokens"]) for passage in passages])
    mean = torch.nn.functional.normalize((rows * weights[:, None]).sum(0), dim=0)
    assert torch.allclose(mean, torch.tensor(item["embedding"]), atol=1e-6)
    # A passage is embedded like its text. Its tokens may differ at both ends, where a word can be divided.
    middle = LONG[passages[1]["start"] : passages[1]["end"]]
    [text] = server.http.post("/v1/embeddings", json={"input": [middle]}).json()["data"]
    assert float(torch.dot(torch.tensor(text["embedding"]), rows[1])) > 0.99


@pytest.mark.feature("Model family: over HTTP: long documents (IO processor, /pooling)", "{device}")
@pytest.mark.usefixtures("device")
def test_documents_are_ranked_by_their_best_passage(server: Server) -> None:
    """Tests a sentence in the middle of a long document, which the document's own vector does not show."""
    documents = [LONG, f"{LONG} {NEEDLE} {LONG}", "Ducks swim."]
    fields = {"query": "How do plants make sugar?", "documents": documents, "passage_tokens": 48}
    answer = pool(server, **fields).json()["data"]
    first = answer["results"][0]
    assert first["index"] == 1
    assert NEEDLE in documents[1][first["passage"]["start"] : first["passage"]["end"]]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[1] + 0.1
    assert len(pool(server, **fields | {"top_n": 1}).json()["data"]["results"]) == 1
    assert answer["usage"]["prompt_tokens"] > 1000


def test_the_page_shows_the_answer_to_its_request(server: Server) -> None:
    [body] = re.findall(r"^curl -s http://127\.0\.0\.1:8000/pooling .*\n  -d '(.*)'$", DOCUMENTS, re.MULTILINE)
    [shown] = re.findall(r"(?s)```json\n(\{\n.*?\n\})\n```", DOCUMENTS)
    answer, expected = pool(server, **json.loads(body)["data"]).json()["data"], json.loads(shown)
    for ours, theirs in zip(answer["results"], expected["results"], strict=True):
        assert ours.pop("relevance_score") == pytest.approx(theirs.pop("relevance_score"), abs=5e-3)
    assert answer == expected


PROGRAM = """
import json, sys
from vllm import LLM
if __name__ == "__main__":
    llm = LLM(sys.argv[1], runner="pooling", io_processor_plugin="backplane_documents", max_num_seqs=4, dtype="float32")
    [output] = llm.encode({"data": json.loads(sys.argv[2])}, pooling_task="plugin")
    print("answer:", json.dumps(output.outputs))
"""


def test_a_program_gets_vectors_of_documents(minilm: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    """Tests `LLM.encode` as in docs/serve/long-documents.md. It has no request id and no event loop."""
    (tmp_path / "program.py").write_text(PROGRAM)
    data = {"documents": [*TEXTS, LONG]}
    with Child([sys.executable, "program.py", str(minilm), json.dumps(data)], tmp_path / "log") as child:
        assert child.wait(300) == 0, child.text()
    [line] = re.findall(r"^answer: (.*)$", child.text(), re.MULTILINE)
    *short, long = json.loads(line)["data"]
    near = closeness([item["embedding"] for item in short], expected)
    assert min(near) >= EXACT, near
    assert len(long["passages"]) >= 3


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({}, "data.documents: Field required"),
        ({"documents": []}, "data.documents: List should have at least 1 item"),
        ({"documents": ["a", ""]}, "data.documents.1: String should have at least 1 character"),
        ({"documents": ["a", " "]}, "data.documents.1 has no tokens"),
        ({"documents": ["a" * 1_000_001]}, "the texts have 1,000,001 characters, and a request may have 1,000,000"),
        ({"documents": ["a " * 5000], "passage_tokens": 1}, "the documents have more than 4,096 passages of 1 tokens"),
        ({"documents": ["a"], "passages": 4}, "data.passages: Extra inputs are not permitted"),
        ({"documents": ["a"], "passage_tokens": 100_000}, "data.passage_tokens is 100000, and the model has room for"),
        (
            {"documents": ["a"], "passage_tokens": 8, "overlap_tokens": 5},
            "may be half of a passage of 8 tokens at most",
        ),
        ({"documents": ["a"], "top_n": 1}, "top_n needs a query"),
        ({"documents": ["a"], "query": "b", "passage_embeddings": True}, "for requests without a query"),
        ({"documents": ["a"], "query": prompts.PASSAGE * 4}, "tokens, and the model has room for"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(server: Server, data: dict[str, Any], text: str) -> None:
    answer = pool(server, **data)
    assert answer.status_code == 400, answer.text
    assert text in answer.json()["error"]["message"]


CUT, PADDED = {"truncate_prompt_tokens": 8}, {"truncate_prompt_tokens": -1, "padding": "max_length"}


@pytest.mark.parametrize("fields", [CUT, PADDED])
def test_fields_that_change_passages_are_refused(server: Server, fields: dict[str, Any]) -> None:
    request = {"model": "all-MiniLM-L6-v2", "data": {"documents": [prompts.PASSAGE]}}
    answer = server.http.post("/pooling", json=request | fields)
    assert answer.status_code == 400, answer.text
    assert "truncate_prompt_tokens or padding" in answer.json()["error"]["message"]


def test_requests_with_the_same_id_do_not_share_answers(server: Server) -> None:
    """Tests that a request whose id is in use is refused, and that an id is free again when its request has ended."""

    def ask(number: int) -> httpx.Response:
        documents = [LONG] * 20 if number == 0 else ["x"] * (number + 1)
        request = {"model": "all-MiniLM-L6-v2", "data": {"documents": documents}}
        return server.http.post("/pooling", json=request, headers={"X-Request-Id": "same"}, timeout=60)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(8)))
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            assert len(answer.json()["data"]["data"]) == (20 if number == 0 else number + 1)
        else:
            assert answer.status_code == 400 and "is running; send another" in answer.text
    assert {answer.status_code for answer in answers} == {200, 400}
    assert ask(2).status_code == 200
