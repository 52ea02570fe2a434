"""Tests with vLLM, imported once: its parser agrees with our tables, and mistakes that only it finds cost one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import with_vllm
from command_lines import ACCEPTED, REFUSED
from transformers import LlamaConfig

from tests import programs
from tests.environment import AT_START
from tests.ports import free_port
from vllm_backplane.early_checks.vllm_options import data_file
from vllm_patchbay.upstream import installed_version

pytestmark = pytest.mark.process

Mistakes = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]

FEW: Mistakes = {
    "value that the configuration refuses": (("--quantization", "int3"), ("int3",)),
    "refusal of Backplane": (("-cc.mode", "3"), ("device 'cpu' runs models eagerly", "-cc.mode=none")),
    "value of a key that vLLM's parser refuses": (
        ("--kv-events-config", '{"buffer_steps": "many"}'),
        ("--kv-events-config: buffer_steps is 'many': ", "valid integer"),
    ),
    "API servers without a front end": (
        ("--headless", "--api-server-count", "2"),
        ("--api-server-count=2", "--headless"),
    ),
}
MORE: Mistakes = {
    "load balancing without a front end": (
        ("--headless", "--data-parallel-hybrid-lb"),
        ("data_parallel_hybrid_lb is not applicable in headless mode",),
    ),
    "two ways of load balancing": (
        ("--data-parallel-rank", "0", "--data-parallel-hybrid-lb"),
        ("Cannot use more than one data parallel load balancing mode",),
    ),
    "option of Backplane's device": (
        ("--additional-config", '{"backplane": {"cpu": {"thread": 2}}}'),
        ("unknown option cpu.thread; did you mean 'threads'?",),
    ),
    "length beyond the model's": (("--max-model-len", "1000000"), ("max_model_len", "1000000")),
    "parser of tool calls": (
        ("--enable-auto-tool-choice", "--tool-call-parser", "nope"),
        ("invalid tool call parser: nope",),
    ),
    "option that needs another": (
        ("--enable-auto-tool-choice",),
        ("--enable-auto-tool-choice requires --tool-call-parser",),
    ),
    "chat template": (("--chat-template", "./none.jinja"), ("./none.jinja",)),
    "method of speculation": (
        ("--speculative-config", '{"method": "nope", "num_speculative_tokens": 2}'),
        ("nope",),
    ),
    "key of a configuration": (
        ("--speculative-config", '{"method": "ngram", "num_speculative_token": 2}'),
        ("unknown key 'num_speculative_token' of SpeculativeConfig; did you mean 'num_speculative_tokens'",),
    ),
    "architecture": (("--hf-overrides", '{"architectures": ["Nope"]}'), ("Nope",)),
}


def run(folder: Path, mistakes: Mistakes, *arguments: str) -> dict[str, Any]:
    LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "model")
    common = [str(folder / "model"), "--load-format", "dummy", "--skip-tokenizer-init", "--port", str(free_port())]
    (folder / "requests").write_text(json.dumps([[*common, *options] for options, _ in mistakes.values()]))
    command = [sys.executable, with_vllm.__file__, str(folder), *arguments]
    done = programs.run(command, cwd=folder, env={**AT_START, "BACKPLANE_DEVICE": "cpu"})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "result").read_text())
    found["served"] = dict(zip(mistakes, found["served"], strict=True))
    return found


def check(result: tuple[int, str], words: tuple[str, ...]) -> None:
    status, errors = result
    assert status == 2, errors
    assert "Traceback" not in errors
    assert errors.startswith("vllm-backplane: error: ") and errors.count("\n") == 1, errors
    missing = [each for each in words if each not in errors]
    assert not missing, (missing, errors)
    assert "validation error" not in errors and "pydantic" not in errors


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("few"), FEW, "judge")


def test_the_table_is_that_of_the_installed_release(found: dict[str, Any]) -> None:
    """Run scripts/record_vllm_options.py if it is not."""
    assert found["options"] == json.loads(data_file(installed_version().release[:2]).read_text())


def test_vllm_accepts_and_refuses_the_same(found: dict[str, Any]) -> None:
    wrong = [(line, said) for line, said in zip(ACCEPTED, found["accepted"], strict=True) if said is not None]
    assert wrong == [], "vLLM refuses what is listed as accepted"
    assert [line for line, said in zip(REFUSED, found["refused"], strict=True) if said is None] == []


@pytest.mark.parametrize("name", FEW)
def test_a_mistake_that_vllm_finds_costs_one_line(found: dict[str, Any], name: str) -> None:
    check(found["served"][name], FEW[name][1])


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("more"), MORE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE)
def test_more_mistakes_that_vllm_finds_cost_one_line(more: dict[str, Any], name: str) -> None:
    check(more["served"][name], MORE[name][1])
