"""Tests that chat templates without bounds are refused, in bounded time and memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.config import chat_template
from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.settings import compat

SOUND = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{{ 'x' * 10 ** 11 }}"
GROWING = (
    "{% set ns = namespace(text='xxxxxxxx') %}{% for a in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)
CHAINED = "{% set a0 = messages %}" + "".join(f"{{% set a{n} = a{n - 1} %}}" for n in range(1, 1000))
"""Names of the messages, of which vLLM looks for each among all of them."""
IN_PARTS = "{% for part in messages[0]['content'] %}{% if part.type is defined and part.text == 'warmup' %}"
"""A loop over the parts of the message, in which only parts have a type. Characters of a text have none."""


def config(folder: Path | str) -> Any:
    hf_config = SimpleNamespace()
    names = {"model": str(folder), "tokenizer": None, "tokenizer_revision": None, "hf_token": None}
    return SimpleNamespace(model_config=SimpleNamespace(**names, hf_config=hf_config))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    monkeypatch.setattr(chat_template, "_command_line", chat_template._CommandLine())
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
        (IN_PARTS + ENDLESS + "{% endif %}{% endfor %}", "takes more than 1 s"),
        (IN_PARTS + LARGE + "{% endif %}{% endfor %}", "takes more than 1024 MiB"),
        ("{% if messages[0].content is string %}{{ raise_exception('') }}{% endif %}" + ENDLESS, "takes more than 1 s"),
        (CHAINED, "takes more than 1 s"),
        ("a" * ((1 << 20) + 1), "has 1048577 characters"),
    ],
    ids=[
        "endless",
        "large",
        "growing",
        "after generation",
        "after JSON",
        "at the warm-up of vLLM",
        "endless for parts",
        "large for parts",
        "for parts after an error for text",
        "while vLLM looks for a loop over parts",
        "long",
    ],
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
        "{{ messages[0].content + '' }}",
        "{% if messages[0].content is string %}{{ raise_exception('parts only') }}{% endif %}",
    ],
)
def test_other_templates_are_left_to_vllm(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    chat_template.require_bounded_template(config(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"tokenizer_config.json": {"pad_token": "<pad>"}}, "pad_token"),
        ({"tokenizer_config.json": {"mask_token": {"content": "<mask>", "lstrip": True}}}, "mask_token"),
        ({"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}}}, "image_token"),
        ({"special_tokens_map.json": {"sep_token": "<sep>"}}, "sep_token"),
        ({}, "bos_token"),
    ],
    ids=["a text", "an object", "of this tokenizer alone", "in another file", "of the tokenizer's class"],
)
def test_a_template_is_rendered_with_the_tokens_of_its_tokenizer(tmp_path: Path, files: Any, name: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(f"{{% if {name} is defined %}}{LARGE}{{% endif %}}")
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="takes more than 1024 MiB"):
        chat_template.require_bounded_template(config(tmp_path))


@pytest.mark.parametrize(
    ("given", "more", "expected"),
    [
        ({"bos_token": None, "pad_token": "<pad>"}, {}, {"eos_token": "</s>", "pad_token": "<pad>"}),
        ({"eos_token": "<a>"}, {"eos_token": "<b>"}, {"bos_token": "<s>", "eos_token": "<b>"}),
        ({"added_tokens_decoder": {}}, {"pad_token": "<b>"}, {"bos_token": "<s>", "eos_token": "</s>"}),
        ({"add_bos_token": True, "pad_token": 7}, {}, {"bos_token": "<s>", "eos_token": "</s>"}),
        ({"extra_special_tokens": ["<a>"]}, [], {"bos_token": "<s>", "eos_token": "</s>"}),
    ],
    ids=["taken away", "in both files", "the other file ignored", "no tokens", "without a name"],
)
def test_the_tokens_of_a_tokenizer(tmp_path: Path, given: Any, more: Any, expected: dict[str, str]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(more))
    assert chat_template.special_tokens(tmp_path) == expected


@pytest.mark.process
def test_each_of_several_templates_is_checked(tmp_path: Path) -> None:
    several = [{"name": "default", "template": SOUND}, {"name": "tools", "template": ENDLESS}, {"name": "odd"}, 5]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json tools takes more than"):
        chat_template.require_bounded_template(config(tmp_path))


@pytest.mark.process
def test_the_time_of_all_templates_is_limited(tmp_path: Path) -> None:
    """Tests many templates, each of which alone would be accepted."""
    slow = "{% for a in range(600) %}{% for b in range(999) %}{% endfor %}{% endfor %}"
    several = [{"name": str(place), "template": f"{place}{slow}"} for place in range(200)]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several[:1]}))
    chat_template.require_bounded_template(config(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    with pytest.raises(CheckpointError, match=r"json \d+ takes more than 1 s .*\(templates before it included: \d+\)"):
        chat_template.require_bounded_template(config(tmp_path))


@pytest.mark.parametrize("is_file", [True, False])
def test_the_template_of_a_command_line_is_read_as_by_vllm(tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "template.jinja").write_text(SOUND)
    arguments: Any = SimpleNamespace(
        chat_template=str(tmp_path / "template.jinja") if is_file else SOUND, default_chat_template_kwargs={"number": 9}
    )
    assert compat.chat_template_of(arguments) == (SOUND, {"number": 9})
    assert compat.chat_template_of(SimpleNamespace(chat_template=None, default_chat_template_kwargs=None)) == (None, {})


COUNTING = "{% for a in range(number) %}{% for b in range(number) %}{% endfor %}{% endfor %}"
"""A template whose time depends on a variable."""


@pytest.mark.process
@pytest.mark.parametrize("is_there", [True, False])
def test_the_template_of_a_command_line_is_checked(tmp_path: Path, is_there: bool, hub: Path) -> None:
    given = config(tmp_path if is_there else "organization/unknown")
    chat_template.set_command_line(SOUND, {})
    chat_template.require_bounded_template(given)
    chat_template.set_command_line(ENDLESS, {})
    with pytest.raises(
        BackplaneError, match=r"the template of --chat-template takes more than 1 s .*; correct it, or give"
    ):
        chat_template.require_bounded_template(given)


@pytest.mark.process
def test_templates_are_rendered_with_the_variables_of_a_command_line(tmp_path: Path) -> None:
    chat_template.set_command_line(COUNTING, {"number": 9})
    chat_template.require_bounded_template(config(tmp_path))
    chat_template.set_command_line(COUNTING, {"number": 99999})
    with pytest.raises(
        BackplaneError, match=r"of --chat-template takes .*; change --default-chat-template-kwargs, or give"
    ):
        chat_template.require_bounded_template(config(tmp_path))
    chat_template.set_command_line(None, {"number": 99999})
    (tmp_path / "chat_template.jinja").write_text(COUNTING)
    with pytest.raises(CheckpointError, match=r"takes .*; change --default-chat-template-kwargs, choose another"):
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
    for name in ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"):
        os.mkfifo(tmp_path / name)
    assert chat_template.templates(tmp_path) == {}
    assert chat_template.special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("text", ["", "[]", "null", "{", json.dumps({"chat_template": 7}), "[" * 100000])
def test_damaged_files_are_left_to_vllm(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    chat_template.require_bounded_template(config(tmp_path))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the only revision of organization/model in a cache of the hub, which cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    stored = tmp_path / "models--organization--model"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("0" * 40)
    snapshot = stored / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.mark.process
def test_a_template_of_the_hub_is_checked(hub: Path) -> None:
    (hub / "chat_template.jinja").write_text(SOUND)
    chat_template.require_bounded_template(config("organization/model"))
    (hub / "chat_template.jinja").write_text(LARGE)
    with pytest.raises(CheckpointError, match=r"the chat template in .*chat_template\.jinja takes more than 1024 MiB"):
        chat_template.require_bounded_template(config("organization/model"))


@pytest.mark.parametrize("name", ["organization/unknown", "not a name//"])
def test_a_template_that_cannot_be_downloaded_is_reported(
    name: str, hub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat_template.require_bounded_template(config(name))
    assert f"The chat template of {name} is not checked" in caplog.text


def test_checkpoints_of_another_hub_are_not_looked_up(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    (hub / "chat_template.jinja").write_text(LARGE)
    chat_template.require_bounded_template(config("organization/model"))
