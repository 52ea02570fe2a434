"""Adds ranges to vLLM's torch profiler traces: one for every module of the model, under the module's name.

vLLM's own profiler writes the trace (`--profiler-config`). It is created here instead of in vLLM, whose worker supports
only the device types of its own platforms, and continues silently if a trace was not written. The ranges are forward
hooks that exist only while a trace is taken, so they cost nothing at other times.
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
from vllm_backplane.worker.numeric_guard import watched_modules

KIND = "torch"
"""vLLM's name of the profiler that supports every device."""


class ModuleRanges:
    """Opens and closes a profiler range around each module, with forward hooks, until they are removed."""

    def __init__(self, model: nn.Module) -> None:
        self._open: list[record_function] = []
        self._handles = []
        for watched in watched_modules(model, submodules=True):
            begin = self._begin(f"{watched.names[0] or 'model'} ({watched.kind})")
            self._handles.append(watched.module.register_forward_pre_hook(begin))
            # Called also if the module raises. Otherwise later ranges would appear inside this one.
            self._handles.append(watched.module.register_forward_hook(self._end, always_call=True))

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
    """Records one trace, from the start of its profiler to the written file."""

    def __init__(self, config: ProfilerConfig, prefix: str | None, rank: int, local_rank: int) -> None:
        require_writable_folder(config.torch_profiler_dir)
        self._folder = config.torch_profiler_dir
        self._began = self._written = False
        suffix = get_worker_rank_suffix(global_rank=rank)
        name = f"{prefix}_{suffix}" if prefix else suffix
        write = torch.profiler.tensorboard_trace_handler(self._folder, name, config.torch_profiler_use_gzip)

        def ready(profile: torch.profiler.profile) -> None:
            write(profile)
            self._written = True

        self.profiler = TorchProfilerWrapper(config, name, local_rank, activities(config), ready)

    def require_start(self, delayed: bool) -> None:
        """Raises if the profiler is not running, unless its start is `delayed` by some steps."""
        if not self.profiler.is_running and not delayed:
            raise BackplaneError("the profiler did not start; a warning in the log gives the reason")

    def has_ended(self) -> bool:
        """Returns whether the profiler has stopped on its own, after the requested number of steps."""
        self._began |= self.profiler.is_running
        return self._began and not self.profiler.is_running

    def require_file(self) -> None:
        """Raises if no trace file was written."""
        if not self._written:
            raise BackplaneError(
                f"no trace was written to {self._folder}; a warning in the log gives the reason, or fewer steps ran "
                "than the profiler had to wait for"
            )


def activities(config: ProfilerConfig) -> list[Any]:
    """Returns the activities to record: the host's calls on every device, and the device's work if PyTorch's profiler
    supports the device."""
    known = torch.profiler.supported_activities()
    names = [name for name, activity in TorchProfilerActivityMap.items() if activity in known]
    requested = getattr(config, "torch_profiler_activities", None) or names  # since vLLM 0.31
    if missing := sorted(set(requested) - set(names)):
        raise BackplaneError(
            f"PyTorch cannot record {', '.join(missing)} here; choose --profiler-config.torch_profiler_activities "
            f"among: {', '.join(names)}"
        )
    return list(requested)


@contextmanager
def profiler_hidden_from_vllm(config: VllmConfig) -> Iterator[None]:
    """Removes the torch profiler from the configuration while vLLM's worker is constructed, because that refuses a
    profiler on device types of other platforms. Profilers of other kinds stay."""
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


def require_writable_folder(folder: str) -> None:
    """Creates the folder for traces, or raises now; vLLM would fail only when the trace is complete."""
    if "://" in folder:  # a remote file system
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as fault:
        raise _unusable(folder, str(fault)) from fault
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, "it is not writable")


def _unusable(folder: str, reason: str) -> BackplaneError:
    return BackplaneError(
        f"traces cannot be written to {folder} ({reason}); name another folder: --profiler-config.torch_profiler_dir"
    )
