"""Defines `CpuDevice`, which implements the device contract for the host's processor."""

from __future__ import annotations

import multiprocessing
import platform
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch

from vllm_backplane.device import (
    Capabilities,
    CodeLayout,
    Device,
    MemoryInfo,
    Probe,
    Properties,
)
from vllm_backplane.device.graph import Graph
from vllm_backplane.devices.cpu import native, threads
from vllm_backplane.devices.cpu.graphs import CpuGraph
from vllm_backplane.devices.cpu.sleep import SleepPool, folder_on_disk, unfit_reason
from vllm_backplane.host import fork_safety, host_memory
from vllm_backplane.host.cores import usable_cores
from vllm_backplane.host.memory_ledger import ledger
from vllm_backplane.settings.options import Option, integer, text


class CpuDevice(Device):
    """Implements the host's processor as one card."""

    name: ClassVar[str] = "cpu"
    torch_type: ClassVar[str] = "cpu"
    dispatch_key: ClassVar[str] = "CPU"
    priority: ClassVar[int] = 0  # below every accelerator, so that an available one is preferred
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kv_cache_dtypes=("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        graphs=True,
        graph_sizes=tuple(range(1, 65)),  # padding costs time like real rows, so every size has its own graph
        capture_computes=True,
        sleep=True,
        fork=True,  # see fork_safety.py
        host_memory=True,
        profile_tokens=128,
        default_memory_share=0.5,  # the rest is left to the system and to other processes
    )
    options: ClassVar[tuple[Option[Any], ...]] = (
        Option(
            "threads",
            None,
            integer(1),
            "Threads per worker. Default: OMP_NUM_THREADS, at most a worker's share of the cores; if the variable is "
            "not set, the physical cores that this process may use, divided among the workers of the host, with one "
            "core left free if a share is 8 or more. It is an error if all workers together have more threads than "
            "there are hardware threads. See docs/serve/parallel.md.",
        ),
        Option(
            "bind",
            threads.AUTO,
            threads.binding,
            "Cores that the workers of the host are bound to, such as 0-7,16-23, divided among them in that order. off "
            "binds none. auto binds several workers on a machine with several NUMA nodes to cores of their own, each "
            "to one node if the workers divide evenly among the nodes; it does not bind under a container's CPU quota, "
            "because the cores are then shared with others.",
        ),
        Option(
            "sleep_folder",
            None,
            text,
            "Folder on a disk for the weights while the server sleeps at level 1; default: the folder for temporary "
            "files, or /var/tmp.",
        ),
    )

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings)
        self._pools: dict[str, SleepPool] = {}
        self._active_pool: SleepPool | None = None

    @classmethod
    def probe(cls) -> Probe:
        return Probe(available=True, count=1)

    def load(self) -> None:
        fork_safety.install()

    def load_kernels(self) -> None:
        native.load()

    def kernel_provider(self) -> str:
        return native.LIBRARY_NAME

    def problems(self) -> tuple[tuple[str, str], ...]:
        fault = native.fault()
        return () if fault is None else (fault,)

    def faulty_settings(self) -> tuple[tuple[str, str], ...]:
        found = threads.faults(self._machine, self.settings["threads"], self.settings["bind"])
        folder = self.settings["sleep_folder"]
        reason = unfit_reason(Path(folder)) if folder else None
        if reason is not None:
            found = (*found, (f"cpu.sleep_folder: {folder} {reason}", "give a folder on a disk"))
        return found

    def refuse_workers(self, workers_on_host: int) -> None:
        threads.refuse_too_many_threads(self._machine, workers_on_host, self.settings["threads"], self.settings["bind"])

    def properties(self, index: int = 0) -> Properties:
        return Properties(name=self._model_name, uuid=f"cpu-{platform.node()}", compute_units=usable_cores())

    def memory(self, index: int = 0) -> MemoryInfo:
        now = host_memory.usable_memory()
        free = max(now.free - ledger.unwritten_bytes(), 0)
        return replace(now, free=free, reserved_by_others=ledger.unwritten_bytes(of_others=True))

    def own_memory(self, index: int = 0) -> int:
        return host_memory.own_resident_memory()

    def reset_peak_memory(self, index: int = 0) -> None:
        host_memory.reset_peak()

    def peak_memory(self, index: int = 0) -> int:
        return host_memory.own_peak_memory()

    def empty_cache(self) -> None:
        host_memory.trim_heap()

    def arrange_linear(self, weight: torch.Tensor) -> torch.Tensor | None:
        return native.to_blocks(weight) if native.wants_blocks(weight.dtype) else None

    def quantized_layout(self, bits: int) -> CodeLayout:
        return native.quantized_layout() or super().quantized_layout(bits)

    def zeroed_bytes(self, count: int, index: int = 0) -> torch.Tensor:
        # numpy requests zero pages from the system, which become resident when they are first written. torch.zeros
        # would write the whole cache at start, which takes seconds for gigabytes, although much of it often stays
        # unused.
        remedy = "start this server again, or lower BACKPLANE_MEMORY_SHARE"
        ledger.reserve(count, purpose="a KV cache", remedy=remedy)
        pages = numpy.zeros(count, dtype=numpy.int8)
        weakref.finalize(pages, ledger.cancel, count).atexit = False
        tensor = torch.from_numpy(pages)
        if self._active_pool is not None:
            self._active_pool.add(tensor)
            self._active_pool.add_reservation(pages, count)
        return tensor

    def read_memory(self, memory: torch.Tensor) -> bool:
        if not native.load():
            return False
        native.read_memory(memory, torch.get_num_threads())
        return True

    @contextmanager
    def sleep_pool(self, tag: str, index: int = 0) -> Iterator[None]:
        self._sleep_folder()  # raises at start rather than at the first sleep if the folder cannot be used
        pool = self._pools.setdefault(tag, SleepPool(self._sleep_folder))
        before, self._active_pool = self._active_pool, pool
        try:
            with pool.in_use():
                yield
        finally:
            self._active_pool = before

    def release(self, tag: str, keep: bool, index: int = 0) -> None:
        self._pools[tag].release(keep)

    def restore(self, tag: str, index: int = 0) -> None:
        self._pools[tag].restore()

    def _sleep_folder(self) -> Path:
        return folder_on_disk(self.settings["sleep_folder"])

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def check_copies(self) -> str | None:
        return "its tensors are in the host's memory, so nothing is copied to it"

    def wants_graphs(self) -> bool:
        return native.built()

    def new_graph(self, index: int = 0) -> Graph:
        return CpuGraph()

    def place_worker(self, index: int, workers_on_host: int) -> None:
        cpus = self._share_of(index, workers_on_host).cpus
        # With one worker, vLLM may run it in the user's own process, which has other work too. Such a process is bound
        # only if the user requests it.
        is_worker_process = multiprocessing.parent_process() is not None
        if cpus is not None and (is_worker_process or self.settings["bind"] != threads.AUTO):
            threads.bind(cpus)

    def prepare_worker(self, workers_on_host: int) -> None:
        torch.set_num_threads(self._share_of(0, workers_on_host).threads)

    def _share_of(self, index: int, workers: int) -> threads.Share:
        return threads.share(self._machine, index, workers, self.settings["threads"], self.settings["bind"])

    @cached_property
    def _machine(self) -> threads.Machine:
        """Returns the usable cores, read before a worker is bound to some of them."""
        return threads.this_machine()

    @cached_property
    def _model_name(self) -> str:
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            return platform.processor() or platform.machine()
        return platform.machine()
