"""Tests what is reported about the model of a server that starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.config.start_report import format_of, report_model, size_on_disk
from vllm_backplane.process import start_events


def model(path: Path, quantization: str | None = None, **more: Any) -> Any:
    config = SimpleNamespace(quantization_config={"file": str(path)})
    return SimpleNamespace(model=str(path), quantization=quantization, hf_config=config, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(b"0" * 70)
    (tmp_path / "b.safetensors").write_bytes(b"0" * 7)
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * 900)
    return tmp_path


def test_the_size_is_that_of_the_files_that_are_loaded(folder: Path) -> None:
    assert size_on_disk(model(folder)) == 77
    assert size_on_disk(model(folder / "b.safetensors", "gguf")) == 7
    assert size_on_disk(model(folder / "nothing")) is None
    assert size_on_disk(model(folder, "gguf")) is None


def test_a_link_to_nothing_fails_no_start(folder: Path) -> None:
    (folder / "c.safetensors").symlink_to(folder / "nothing")
    assert size_on_disk(model(folder)) is None


@pytest.mark.parametrize(
    ("quantization", "text"), [(None, "full precision"), ("gguf", "GGUF"), ("awq", "quantized (awq)")]
)
def test_the_format_is_named(quantization: str | None, text: str) -> None:
    assert format_of(model(Path("/srv"), quantization)) == text


def test_model_and_device_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, vllm_log: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv(start_events.VARIABLE, '{"began": 0.0}')
    chosen: Any = SimpleNamespace(device=SimpleNamespace(name="cpu"), selection=SimpleNamespace(reason="the only one"))
    config: Any = SimpleNamespace(
        model_config=model(folder, served_model_name="tiny", dtype="torch.float32", max_model_len=256)
    )
    report_model(config, chosen)
    (text,) = vllm_log()
    assert text.startswith("Start: step=model ")
    assert text.endswith(
        'name=tiny format="full precision" bytes=77 dtype=float32 context=256 device=cpu reason="the only one"'
    )
