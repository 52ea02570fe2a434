"""Tests the check of an adapter's files before vLLM reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_backplane.lora.adapter_files import CONFIG, WEIGHTS, UnusableFiles, require_loadable

MAX_RANK = 16


def adapter(folder: Path, **config: Any) -> str:
    """Writes an adapter_config.json with some values changed, and returns the folder."""
    (folder / CONFIG).write_text(json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}))
    return str(folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rank_pattern": None, "alpha_pattern": {}},
        {"rank_pattern": {"q_proj": 16, r"^model\.layers\.\d\.self_attn\..*$": 4, "layers.0.mlp|lm_head": 1}},
        {"rank_pattern": {r"layers\.\d+\.self_attn\.(q|k|v)_proj": 4, r"layers\.[0-7]\.(?:mlp|attn)": 8}},
        {"lora_alpha": 0.5},
        {"lora_alpha": -16, "alpha_pattern": {"q_proj": -0.5}, "modules_to_save": ["score"]},
    ],
)
def test_sound_files_are_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    require_loadable(adapter(tmp_path, **config), MAX_RANK)


def test_what_is_not_there_is_left_to_vllm(tmp_path: Path) -> None:
    require_loadable(str(tmp_path / "absent"), MAX_RANK)
    require_loadable(str(tmp_path), MAX_RANK)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": "8"}, "r in adapter_config.json is '8', not a positive integer"),
        ({"r": 0}, "r in .* is 0"),
        ({"r": True}, "r in .* is True"),
        ({"r": 8.0}, r"r in .* is 8\.0"),
        ({"lora_alpha": float("nan")}, "lora_alpha in .* is nan"),
        ({"lora_alpha": [1]}, r"lora_alpha in .* is \[1\]"),
        ({"lora_alpha": 10**400}, "lora_alpha in .* is 1000"),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern in .* has '4' for 'q_proj', not a number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern in .* for 'q_proj', not a number"),
        ({"modules_to_save": 5}, "modules_to_save in .* is 5, not a list of names"),
        ({"modules_to_save": [["score"]]}, "modules_to_save in .*, not a list of names"),
        ({"rank_pattern": [1]}, "rank_pattern in .* has no object"),
        ({"rank_pattern": {"q_proj": 17}}, "the rank 17 for 'q_proj', and ranks from 1 to 16 are served"),
        ({"rank_pattern": {"q_proj": 1.5}}, "the rank 1.5"),
        ({"rank_pattern": {"(a+)+$": 4}}, "not a pattern of module names"),
        ({"alpha_pattern": {"(.*)*": 4}}, "not a pattern of module names"),
        ({"rank_pattern": {"q" * 1001: 4}}, "more than 1000 characters"),
        ({"rank_pattern": {"(": 4}}, "not a pattern of module names"),
        (
            {"rank_pattern": {f"layers.{place}": 4 for place in range(501)}},
            "501 patterns of module names, more than 500",
        ),
    ],
)
def test_unsound_values_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableFiles, match=message):
        require_loadable(adapter(tmp_path, **config), MAX_RANK)


def names(*modules: str) -> bytes:
    """Returns the header of a safetensors file with both factors of the modules."""
    text = json.dumps({f"base_model.model.{module}.lora_{letter}.weight": {} for module in modules for letter in "AB"})
    return len(text).to_bytes(8, "little") + text.encode()


MODULES = names(*(f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(80) for name in "qkvo"))


@pytest.mark.parametrize(
    ("pattern", "contents", "accepted"),
    [
        (r".*\.self_attn\..*", MODULES, True),
        (r"layers\.\d+\.self_attn\.(q|k|v)_proj", MODULES, True),
        (r"layers\.[0-7]\.(?:mlp|attn)", MODULES, True),
        (".*" * 20 + "x", MODULES, False),
        ("(.|.)" * 39 + "Z", MODULES, False),
        ("(|.)" * 49 + "Z", MODULES, False),
        (r".*x.*", names("x." * 8000), False),
        (".*q_proj", b"\xff" * 20, False),
        (".*q_proj", b"", False),
    ],
)
def test_patterns_that_take_long_are_refused(tmp_path: Path, pattern: str, contents: bytes, accepted: bool) -> None:
    folder = adapter(tmp_path, rank_pattern={pattern: 4})
    require_loadable(folder, MAX_RANK)  # without weights, which vLLM reports
    (tmp_path / WEIGHTS[0]).write_bytes(contents)
    if accepted:
        require_loadable(folder, MAX_RANK)
    else:
        with pytest.raises(UnusableFiles, match=r"may take very long to match|require a readable"):
            require_loadable(folder, MAX_RANK)


def test_patterns_need_names_that_can_be_listed(tmp_path: Path) -> None:
    folder = adapter(tmp_path, alpha_pattern={"q_proj": 4})
    (tmp_path / WEIGHTS[1]).write_bytes(b"a pickle")
    with pytest.raises(UnusableFiles, match=r"require a readable adapter_model\.safetensors"):
        require_loadable(folder, MAX_RANK)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(UnusableFiles, match=r"is not JSON|has no object"):
        require_loadable(str(tmp_path), MAX_RANK)


def test_a_large_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_bytes(b" " * (1 << 21))
    with pytest.raises(UnusableFiles, match="more than 1048576 bytes"):
        require_loadable(str(tmp_path), MAX_RANK)


@pytest.mark.parametrize("name", [CONFIG, "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipes_and_folders_are_refused_without_opening_them(tmp_path: Path, name: str, make: Any) -> None:
    make(tmp_path / name)
    with pytest.raises(UnusableFiles, match=f"{name} is not a regular file"):
        require_loadable(str(tmp_path), MAX_RANK)


@pytest.mark.parametrize("path", ["/" + "n" * 300, "/a" * 4000, "/tmp/\0"])
def test_a_path_that_cannot_be_opened_is_refused(path: str) -> None:
    with pytest.raises(UnusableFiles, match="cannot be opened") as fault:
        require_loadable(path, MAX_RANK)
    assert len(str(fault.value)) < 300


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableFiles, match="is not a folder"):
        require_loadable(str(tmp_path / "file"), MAX_RANK)
