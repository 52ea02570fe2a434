"""Runs one end-to-end step with the vLLM of this Python: smoke.py chat|batch|embeddings|features-DEVICE FOLDER.

Results are compared with those of transformers. Logs are written to FOLDER. The helpers are those of the end-to-end
tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import gguf_models
import lora_adapters
import prompts
import reference
import tiny_models
import torch
from engine import batch, greedy, job, run_engines
from server import Server

from vllm_backplane.models import DEFAULT, FULL_PRECISION, obtain

TOKENS = 24
PROMPTS = prompts.SHORT[:6]
TEXTS = ("Paris is the capital of France.", "A cat sleeps on the warm stove.", "x", prompts.PASSAGE[:700])
CLOSENESS = 0.9999
"""Minimum cosine similarity between our vector and that of transformers."""
ROUNDED = 0.05
"""Largest mean difference of log-probabilities with a GGUF file."""


def chat(folder: Path) -> None:
    """Sends a chat request to a real server with the default model, with and without streaming, and opens its page."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with Server(folder, warm=False) as server:
        completions = server.client().chat.completions
        whole = completions.create(model=DEFAULT.served_name, messages=messages, temperature=0, max_tokens=TOKENS)
        stream = completions.create(
            model=DEFAULT.served_name, messages=messages, temperature=0, max_tokens=TOKENS, stream=True
        )
        streamed = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
        log = server.text()
        page, status = server.http.get("/"), server.http.get("/backplane/status")
    answer = whole.choices[0].message.content or ""
    print(f"answer: {answer!r}")
    assert "Paris" in answer, answer
    assert streamed == answer, streamed
    assert "Operators on device cpu:" in log, f"not on Backplane: {server.log}"
    assert "endpoint plugin" not in log, "a warning of the page, which is served"
    assert page.text.startswith("<!doctype html>"), page.text
    found = status.json()
    assert found["facts"]["unknown"] == [], found
    assert found["facts"]["requests"]["path"] == "/v1/chat/completions", found
    assert found["live"]["requests"]["generated_tokens"] > 0, found


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


def features(device: str, folder: Path) -> None:
    """Generates with tiny models on a device, once for each feature, and compares with transformers."""
    model = tiny_models.save_llama(folder / "tiny", tokenizer_of=obtain(FULL_PRECISION.name))
    file = folder / "tiny.gguf"
    in_file = replace(gguf_models.MISTRAL, types=(gguf_models.Type.Q8_0, gguf_models.Type.Q4_0)).write(file)
    plain, merged = reference.load(model), reference.load(model)
    adapter = lora_adapters.make(folder / "adapter", plain, 4, ("q_proj", "v_proj", "down_proj"), 0.5, seed=1)
    adapter.merge(merged)
    ids = [[7, 300, 21, 9000, 44], list(range(1000, 1040)), [40000, 3]]
    expected, adapted = (
        [each.token_ids for each in reference.continue_together(transformer, ids, TOKENS)]
        for transformer in (plain, merged)
    )
    assert expected != adapted
    work = batch(ids, greedy(TOKENS))
    with_adapter = {**work, "adapters": [["smoke", 1, str(adapter.folder)], None, ["smoke", 1, str(adapter.folder)]]}
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    asleep = [{"sleep": 1}, {"wake": None}]
    small = [[each % 500 + 5 for each in prompt] for prompt in ids]
    jobs = {
        "eager": job(model, work, enforce_eager=True),
        "graphs": job(model, steps=[{"batch": work}, {"rpc": "replays"}]),
        "sleep": job(model, steps=[{"batch": work}, *asleep, {"batch": work}], enable_sleep_mode=True),
        "LoRA": job(model, with_adapter, enable_lora=True, max_lora_rank=8),
        "draft tokens": job(model, work, speculative_config=draft),
        "GGUF": job(file, batch(small, greedy(TOKENS, logprobs=0))),
    }
    variables = {"BACKPLANE_DEVICE": device, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    results = dict(
        zip(jobs, run_engines(folder, list(jobs.values()), variables, device=device, warm=False), strict=True)
    )
    [counted] = results["graphs"]["steps"][1]
    print(f"replays on {device}: {counted}")
    assert counted["replays"] > 0, counted
    both = [adapted[0], expected[1], adapted[2]]
    for name, outputs, wanted in (
        ("eager", results["eager"]["batches"][0], expected),
        ("graphs", results["graphs"]["steps"][0], expected),
        ("before sleep", results["sleep"]["steps"][0], expected),
        ("after sleep", results["sleep"]["steps"][-1], expected),
        ("LoRA", results["LoRA"]["batches"][0], both),
        ("draft tokens", results["draft tokens"]["batches"][0], expected),
    ):
        got = [output["token_ids"] for output in outputs]
        assert got == wanted, f"{name}: vLLM {got}\ntransformers {wanted}"
        print(f"{name}: {len(got)} x {TOKENS} tokens")
    _compare_probabilities(in_file, small, results["GGUF"]["batches"][0])


def _compare_probabilities(model: Any, prompts: list[list[int]], outputs: list[dict[str, Any]]) -> None:
    """Compares log-probabilities instead of tokens, because inputs are rounded to 8 bits for a GGUF file's weights."""
    differences: list[float] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        scored = reference.prompt_logprobs(model, [*prompt, *output["token_ids"]])[len(prompt) - 1 :]
        differences += [abs(one - other) for one, other in zip(output["logprobs"], scored, strict=True)]
    mean = sum(differences) / len(differences)
    print(f"GGUF: log-probabilities of {len(differences)} tokens differ by {mean:.4f}")
    assert mean < ROUNDED, differences


STEPS: dict[str, Callable[[Path], None]] = {
    "chat": chat,
    "batch": offline,
    "embeddings": embeddings,
    "features-cpu": partial(features, "cpu"),
    "features-sim": partial(features, "sim"),
}

if __name__ == "__main__":
    STEPS[sys.argv[1]](Path(sys.argv[2]))
