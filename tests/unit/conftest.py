"""Defines fixtures that several folders of unit tests share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def one_worker(tmp_path: Path) -> Iterator[None]:
    """Binds Backplane's layers, in a group of one worker."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from vllm_backplane.binding.registry import bind

    bind()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture
def vllm_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns a function that lists what was logged at INFO or above below the logger `vllm`, each record once.

    vLLM's logger does not propagate in a process where vLLM has configured it. pytest may listen to it and to the root
    logger, and then captures a record twice.
    """
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger.name)

    def messages() -> list[str]:
        records = {id(record): record for record in caplog.records if record.name.startswith("vllm.")}
        return [record.getMessage() for record in records.values()]

    return messages
