"""Defines fixtures that several folders of unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
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
