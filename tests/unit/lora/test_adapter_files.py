"""Tests the check of an adapter's files before vLLM reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_backplane.lora.adapter_files import CONFIG, UnusableFiles, require_loadable

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
        {"lora_alpha": 0.5},
        {"lora_alpha": -16},
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
        ({"rank_pattern": [1]}, "rank_pattern in .* has no object"),
        ({"rank_pattern": {"q_proj": 17}}, "the rank 17 for 'q_proj', and ranks from 1 to 16 are served"),
        ({"rank_pattern": {"q_proj": 1.5}}, "the rank 1.5"),
        ({"rank_pattern": {"(a+)+$": 4}}, "not a pattern of module names"),
        ({"alpha_pattern": {"(.*)*": 4}}, "alpha_pattern .* not a pattern of module names"),
        ({"rank_pattern": {"q" * 300: 4}}, "not a pattern of module names"),
    ],
)
def test_unsound_values_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableFiles, match=message):
        require_loadable(adapter(tmp_path, **config), MAX_RANK)


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
