"""What a trace shows besides vLLM's steps and PyTorch's operators: a range for every module of the model, by its name.

vLLM's own profiler writes the trace (`--profiler-config`). It is made here rather than by vLLM, which knows the device
types of its own platforms alone and goes on without a word where a trace was not written. Ranges are hooks of the
modules, which are there only while a trace is taken: at other times a step meets nothing of this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from vllm.config import ProfilerConfig, VllmConfig
from vllm.distributed.utils import get_worker_rank_suffix
from vllm.profiler.wrapper import TorchProfilerActivityMap, TorchProfilerWrapper

from vllm_backplane.errors import BackplaneError
from vllm_backplane.worker.numeric_guard import borders

KIND = "torch"
"""vLLM's name of the profiler that can follow every device."""


class ModuleRanges:
    """Hooks of a model's modules, until they are removed."""

    def __init__(self, model: nn.Module) -> None:
        self._open: list[record_function] = []
        self._handles = []
        for border in borders(model, parts=True):
            begin = self._begin(f"{border.names[0] or 'model'} ({border.kind})")
            self._handles.append(border.module.register_forward_pre_hook(begin))
            # Also where the module raises, or what comes after would seem to be part of it.
            self._handles.append(border.module.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            opened = record_function(name)
            opened.__enter__()
            self._open.append(opened)

        return begin

    def _end(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


class Trace:
    """One, from its start to the file."""

    def __init__(self, config: ProfilerConfig, prefix: str | None, rank: int, local_rank: int) -> None:
        insist_on_folder(config.torch_profiler_dir)
        self._folder = config.torch_profiler_dir
        self._began = self._written = False
        suffix = get_worker_rank_suffix(global_rank=rank)
        name = f"{prefix}_{suffix}" if prefix else suffix
        write = torch.profiler.tensorboard_trace_handler(self._folder, name, config.torch_profiler_use_gzip)

        def ready(profile: torch.profiler.profile) -> None:
            write(profile)
            self._written = True

        self.profiler = TorchProfilerWrapper(config, name, local_rank, activities(config), ready)

    def insist_on_start(self, delayed: bool) -> None:
        if not self.profiler.is_running and not delayed:
            raise BackplaneError("the profiler did not start; a warning in the log says why")

    def ended(self) -> bool:
        """By itself, after as many steps as were asked for."""
        self._began |= self.profiler.is_running
        return self._began and not self.profiler.is_running

    def insist_on_file(self) -> None:
        if not self._written:
            raise BackplaneError(
                f"no trace was written to {self._folder}; a warning in the log says why, or there were fewer steps "
                "than the profiler was to wait for"
            )


def activities(config: ProfilerConfig) -> list[Any]:
    """What PyTorch can record here: the host's calls on every device, and the work of those that its library knows."""
    known = torch.profiler.supported_activities()
    names = [name for name, activity in TorchProfilerActivityMap.items() if activity in known]
    asked = getattr(config, "torch_profiler_activities", None) or names  # since vLLM 0.31
    if missing := sorted(set(asked) - set(names)):
        raise BackplaneError(
            f"PyTorch cannot record {', '.join(missing)} here; choose --profiler-config.torch_profiler_activities "
            f"among: {', '.join(names)}"
        )
    return list(asked)


@contextmanager
def unseen_by_vllm(config: VllmConfig) -> Iterator[None]:
    """vLLM's worker refuses a profiler on device types that it does not know. Kinds other than ours it may judge."""
    given = config.profiler_config
    if given.profiler != KIND:
        yield
        return
    activities(given)
    config.profiler_config = ProfilerConfig()
    try:
        yield
    finally:
        config.profiler_config = given


def insist_on_folder(folder: str) -> None:
    """vLLM would find out when the trace is complete."""
    if "://" in folder:  # another system's
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as fault:
        raise _unusable(folder, str(fault)) from fault
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, "it cannot be written to")


def _unusable(folder: str, reason: str) -> BackplaneError:
    return BackplaneError(
        f"traces cannot be written to {folder} ({reason}); name another folder: --profiler-config.torch_profiler_dir"
    )
