"""Measures and manages the memory of the host that this process may use.

Inside a container the kernel reports the total of the machine, but the OOM killer acts on the limit of the control
group. The smaller of the two counts. A limit of the process itself (`ulimit -v`) makes its allocations fail; it applies
to each process of a server, and to mappings that were never written too.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import torch

from vllm_backplane.device.contract import MemoryInfo
from vllm_backplane.errors import BackplaneError
from vllm_backplane.host.control_groups import control_group_limits

_DONT_NEED, _COLLAPSE = 4, 25
"""Linux's constants MADV_DONTNEED and MADV_COLLAPSE."""
_SET_THP_DISABLE, _GET_THP_DISABLE = 41, 42
"""Linux's constants PR_SET_THP_DISABLE and PR_GET_THP_DISABLE."""
_HUGE = 2 << 20
"""Bytes of a huge page."""


def usable_memory() -> MemoryInfo:
    """Returns the total and available memory of the machine, or of the control group if that is less, and what a limit
    of this process itself leaves it."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in control_group_limits():
        total = min(total, limit)
        free = min(free, max(limit - used, 0))
    left, name = min(((max(limit - used, 0), name) for limit, used, name in process_limits()), default=(None, ""))
    return MemoryInfo(total=total, free=free, limit=name, left_to_process=left)


def process_limits() -> list[tuple[int, int, str]]:
    """Returns (limit, used, name) in bytes of every limit of this process: its address space, and its private data."""
    found = []
    for number, line, name in (
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
    ):
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY:
            found.append((limit, _status_bytes(line) or 0, name))
    return found


def _status_bytes(name: str) -> int | None:
    """Returns a value of /proc/self/status in bytes, or None if a sandbox leaves it out."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def own_resident_memory() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def reset_peak() -> None:
    """Resets the kernel's high-water mark of resident memory to the current value."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # some sandboxes forbid it; the peak then covers the life of the process, so it is too high
        return


def own_peak_memory() -> int:
    """Returns the highest resident memory of this process since `reset_peak`, in bytes."""
    # The second value cannot be reset, so it may be too high.
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def trim_heap() -> None:
    """Returns freed memory of the C library's heap to the system. By itself the library keeps free memory that lies
    between live allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def drop_pages(start: int, length: int) -> None:
    """Returns whole pages of this process's own memory to the system; they stay mapped and read as zeros."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _DONT_NEED) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise BackplaneError(f"{length} bytes of memory cannot be returned to the system (madvise: {reason})")


def drop_unused_storage(storage: torch.UntypedStorage) -> None:
    """Returns the pages of a CPU storage to the system now, if no tensor uses the storage any more.

    PyTorch's allocator would do it later or not at all: some builds use mimalloc, which keeps freed memory and has no
    call that returns it.
    """
    if torch._C._storage_Use_Count(storage._cdata) > 1:  # a tensor still uses it
        return
    start, end = whole_pages(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    if start < end and not memory_is_locked():
        drop_pages(start, end - start)


def memory_is_locked() -> bool:
    """Returns whether memory of this process is locked (mlockall); locked pages cannot be returned to the system."""
    status = Path("/proc/self/status")
    locked = re.search(r"^VmLck:\s+(\d+)", status.read_text(), re.MULTILINE) if status.exists() else None
    return locked is not None and int(locked[1]) > 0


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """Disables transparent huge pages in a context, so that memory becomes resident in small pages.

    If an allocator requests huge pages, as mimalloc does, the first byte written makes 2 MiB resident, including the
    space that the allocator leaves free between tensors.

    The setting holds for the whole process, and Linux passes it on: a child that is forked inside the context keeps it
    for its lifetime, also through exec, and never gets huge pages. So no process may be started inside.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it
    zero = ctypes.c_ulong(0)
    # If the system does not allow it, the process uses more memory; nothing else changes.
    off = (
        prctl is not None
        and prctl(_GET_THP_DISABLE, zero, zero, zero, zero) == 0
        and prctl(_SET_THP_DISABLE, ctypes.c_ulong(1), zero, zero, zero) == 0
    )
    try:
        yield
    finally:
        if prctl is not None and off:
            prctl(_SET_THP_DISABLE, zero, zero, zero, zero)


def collapse_to_huge_pages(storage: torch.UntypedStorage) -> str:
    """Moves the contents of a CPU storage into huge pages, which are faster to read.

    Returns the reason if the system refuses. Returns an empty text if it succeeds, if the system has no huge pages, or
    if the storage is smaller than one.
    """
    if "[never]" in _huge_pages_of_system():
        return ""
    start = -(-storage.data_ptr() // _HUGE) * _HUGE
    end = (storage.data_ptr() + storage.nbytes()) // _HUGE * _HUGE
    if start >= end:
        return ""
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _COLLAPSE) == 0:
        return ""
    number = ctypes.get_errno()
    known = ", which requires Linux 6.1" if number == errno.EINVAL else ""
    return f"MADV_COLLAPSE{known}: {os.strerror(number)}"


@cache
def _huge_pages_of_system() -> str:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:  # a kernel without huge pages
        return "[never]"


def whole_pages(start: int, end: int) -> tuple[int, int]:
    """Returns the range of whole pages inside an address range; if there is none, its end is not above its start."""
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
