"""Tests that chat templates without bounds are refused, in bounded time and memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.config import chat_template
from vllm_backplane.errors import CheckpointError

SOUND = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{{ 'x' * 10 ** 11 }}"
GROWING = (
    "{% set ns = namespace(text='xxxxxxxx') %}{% for a in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)


def config(folder: Path | str) -> Any:
    hf_config = SimpleNamespace()
    return SimpleNamespace(model_config=SimpleNamespace(model=str(folder), tokenizer=None, hf_config=hf_config))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    chat_template.fault_of.cache_clear()


@pytest.mark.process
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ENDLESS, "takes more than 1 s to render one message"),
        (LARGE, "takes more than 1024 MiB"),
        (GROWING, "takes more than (1 s|1024 MiB)"),
        ("{% generation %}a{% endgeneration %}" + ENDLESS, "takes more than 1 s"),
        ("{{ messages | tojson(ensure_ascii=False) }}" + ENDLESS, "takes more than 1 s"),
        ("{% if messages[0].content == 'warmup' %}" + ENDLESS + "{% endif %}", "takes more than 1 s"),
        ("a" * ((1 << 20) + 1), "has 1048577 characters"),
    ],
    ids=["endless", "large", "growing", "after generation", "after JSON", "at the warm-up of vLLM", "long"],
)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_without_bounds_is_refused(tmp_path: Path, file: str, template: str, expected: str) -> None:
    text = template if file.endswith("jinja") else json.dumps({"chat_template": template})
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=f"the chat template in {tmp_path / file} {expected}.* --chat-template"):
        chat_template.require_bounded_template(config(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize(
    "template",
    [
        SOUND,
        "",
        "{{ raise_exception('roles must alternate') }}",
        "{% if",
        "{{ strftime_now('%Y') }}{% break %}",
        "{% generation %}",
    ],
)
def test_other_templates_are_left_to_vllm(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    chat_template.require_bounded_template(config(tmp_path))


@pytest.mark.process
def test_each_of_several_templates_is_checked(tmp_path: Path) -> None:
    several = [{"name": "default", "template": SOUND}, {"name": "tools", "template": ENDLESS}, {"name": "odd"}, 5]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json tools takes more than"):
        chat_template.require_bounded_template(config(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize(
    "file", ["processor_config.json", "chat_template.json", "additional_chat_templates/default.jinja"]
)
def test_every_file_that_may_have_a_template_is_read(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(LARGE if file.endswith("jinja") else json.dumps({"chat_template": LARGE}))
    with pytest.raises(CheckpointError, match=f"the chat template in {tmp_path / file} takes more than 1024 MiB"):
        chat_template.require_bounded_template(config(tmp_path))


@pytest.mark.process
def test_the_template_of_a_gguf_file_is_named_after_the_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(LARGE)
    given = config(tmp_path)
    given.model_config.hf_config.quantization_config = {"quant_method": "gguf", "file": "/models/strange.gguf"}
    with pytest.raises(CheckpointError, match=r"the chat template in /models/strange\.gguf takes"):
        chat_template.require_bounded_template(given)


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        os.mkfifo(tmp_path / name)
    assert chat_template.templates(tmp_path) == {}


@pytest.mark.parametrize("text", ["", "[]", "null", "{", json.dumps({"chat_template": 7}), "[" * 100000])
def test_damaged_files_are_left_to_vllm(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    chat_template.require_bounded_template(config(tmp_path))


def test_a_name_on_a_hub_has_no_template_here() -> None:
    assert chat_template.templates(Path("organization/model")) == {}
