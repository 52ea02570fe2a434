"""Runs one end-to-end step with the vLLM of this Python: smoke.py chat|batch|embeddings FOLDER.

Results are compared with those of transformers. Logs are written to FOLDER. The helpers are those of the end-to-end
tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import prompts
import reference
import torch
from engine import batch, greedy, job, run_engines
from server import Server

from vllm_backplane.models import DEFAULT, FULL_PRECISION, obtain

TOKENS = 24
PROMPTS = prompts.SHORT[:6]
TEXTS = ("Paris is the capital of France.", "A cat sleeps on the warm stove.", "x", prompts.PASSAGE[:700])
CLOSENESS = 0.9999
"""Minimum cosine similarity between our vector and that of transformers."""


def chat(folder: Path) -> None:
    """Sends a chat request to a real server with the default model, with and without streaming."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with Server(folder, warm=False) as server:
        completions = server.client().chat.completions
        whole = completions.create(model=DEFAULT.served_name, messages=messages, temperature=0, max_tokens=TOKENS)
        stream = completions.create(
            model=DEFAULT.served_name, messages=messages, temperature=0, max_tokens=TOKENS, stream=True
        )
        streamed = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
        log = server.text()
    answer = whole.choices[0].message.content or ""
    print(f"answer: {answer!r}")
    assert "Paris" in answer, answer
    assert streamed == answer, streamed
    assert "Operators on device cpu:" in log, f"not on Backplane: {server.log}"


def offline(folder: Path) -> None:
    """Generates from several prompts at once with `LLM` and compares the tokens with those of transformers."""
    from transformers import AutoTokenizer

    model = obtain(FULL_PRECISION.name)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer.encode(text) for text in PROMPTS]
    [result] = run_engines(folder, [job(model, batch(ids, greedy(TOKENS)))], warm=False)
    got = [output["token_ids"] for output in result["batches"][0]]
    expected = [each.token_ids for each in reference.continue_together(reference.load(model), ids, TOKENS)]
    print(f"{len(got)} x {TOKENS} tokens")
    assert got == expected, f"vLLM {got}\ntransformers {expected}"


def embeddings(folder: Path) -> None:
    """Embeds texts of different lengths with `LLM.embed` and compares with the normalized mean of transformers'
    last hidden states."""
    from transformers import AutoModel, AutoTokenizer

    path = obtain("minilm")
    [result] = run_engines(folder, [job(path, embed=TEXTS, runner="pooling")], warm=False)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for text, vector in zip(TEXTS, result["embeddings"], strict=True):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected = states.double().mean(0)
        near = float(torch.nn.functional.cosine_similarity(torch.tensor(vector).double(), expected, dim=0))
        print(f"{near:.6f} {text[:40]!r}")
        assert near >= CLOSENESS, (text, near)


STEPS: dict[str, Callable[[Path], None]] = {"chat": chat, "batch": offline, "embeddings": embeddings}

if __name__ == "__main__":
    STEPS[sys.argv[1]](Path(sys.argv[2]))
