"""Prepares the child process of a campaign as a worker of vLLM, in which layers can be made."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

_context = ExitStack()
"""Holds vLLM's configuration as long as the process lasts."""


def prepare_worker() -> None:
    """Binds Backplane's layers, and makes a group of one worker."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from vllm_backplane.binding.registry import bind

    torch.set_num_threads(1)
    bind()
    _context.enter_context(set_current_vllm_config(VllmConfig()))
    group = Path(tempfile.mkdtemp()) / "group"
    parallel_state.init_distributed_environment(1, 0, f"file://{group}", 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
