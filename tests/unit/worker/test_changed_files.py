"""Tests that a worker computes nothing from a mapped file that was changed."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig

from tests.gguf_bytes import File
from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf import file as gguf_file
from vllm_backplane.gguf.file import GgufFile
from vllm_backplane.worker.worker import BackplaneWorker


def test_a_dummy_batch_is_not_computed_from_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without requests computes dummy batches, for as long as other ranks have some."""
    monkeypatch.setattr(gguf_file, "_mappings", weakref.WeakSet())  # without the files of other tests
    path = tmp_path / "model.gguf"
    path.write_bytes(File().build())
    file = GgufFile(path)
    computed: list[Any] = []
    worker = BackplaneWorker.__new__(BackplaneWorker)
    worker.rank, worker.parallel_config = 0, ParallelConfig()
    worker.model_runner = SimpleNamespace(_dummy_run=lambda *given, **named: computed.append(given))
    worker.execute_dummy_batch()
    os.truncate(path, 64)
    with pytest.raises(CheckpointError, match="was changed while it is served"):
        worker.execute_dummy_batch()
    assert len(computed) == 1
    del file
