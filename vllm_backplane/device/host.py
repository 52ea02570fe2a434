"""Memory and cores of the host as this process may use them.

Inside a container the kernel's totals are the machine's; the control group's limit is what the OOM killer goes by.
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

_ROOT = Path("/sys/fs/cgroup")
_DONT_NEED, _COLLAPSE = 4, 25
"""Linux's numbers for madvise."""
_SET_THP_DISABLE, _GET_THP_DISABLE = 41, 42
"""Linux's numbers for prctl."""
_HUGE = 2 << 20


def host_memory() -> MemoryInfo:
    """Total and available memory: the machine's, or the control group's where that is less."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in control_group_limits():
        total = min(total, limit)
        free = min(free, max(limit - used, 0))
    return MemoryInfo(total=total, free=free)


def control_group_limits(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every control group that bounds this process, from its own up to the root."""
    limits = []
    for folder, version in _groups("memory", root, membership):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(folder / name) for name in names)
        if limit is None or used is None or limit >= 1 << 60:  # v1 writes a huge number for "no limit"
            continue
        # Page cache counts as used, but the kernel gives it up before it kills anyone.
        limits.append((limit, max(used - _reclaimable(folder), 0)))
    return limits


def control_group_cores(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that the control groups grant, if they bound it."""
    granted = []
    for folder, version in _groups("cpu", root, membership):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except (OSError, ValueError):  # the group does not bound time here
            continue
        if quota.isdigit():  # "max" or -1 where there is no bound
            granted.append(int(quota) / int(period))
    return min(granted, default=None)


def usable_cores() -> int:
    """Cores this process may run on (affinity, and a container's quota), not those the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = control_group_cores()
    return max(min(cores, int(quota)), 1) if quota else cores


def _groups(controller: str, root: Path, membership: Path) -> list[tuple[Path, int]]:
    """(folder, version) of the groups that a controller has this process in, from its own up to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no procfs: not Linux, so no control groups either
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base, version = (root / controller, 1) if controllers else (root, 2)
        folder = base / path.strip("/")
        while True:
            found.append((folder, version))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:  # the group does not bound memory here
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get("inactive_file", values.get("total_inactive_file", 0)))


def own_resident_memory() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def reset_peak() -> None:
    """Let the kernel's high-water mark start again from what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # some sandboxes forbid it; the mark then covers the whole life of the process, which errs high
        return


def own_peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # Some sandboxes leave the line out; this mark cannot be reset, so it errs high.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_unused_back() -> None:
    """Have the C library return what was freed to the system; between tensors that are kept, it holds on to it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries have no such call
    if trim is not None:
        trim(0)


def drop_pages(start: int, length: int) -> None:
    """Have the system take back whole pages of this process's own memory, which stay mapped and read as zeros."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _DONT_NEED) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise BackplaneError(f"the system does not take {length} bytes back (madvise: {reason})")


def forget(storage: torch.UntypedStorage) -> None:
    """Give the pages of host memory that nobody looks at any more back to the system now, and not when PyTorch's
    allocator comes to it: some builds bring one of their own (mimalloc), which keeps what is freed and takes no
    orders."""
    if torch._C._storage_Use_Count(storage._cdata) > 1:  # somebody still looks at it
        return
    start, end = whole_pages(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    if start < end and not is_locked():
        drop_pages(start, end - start)


def is_locked() -> bool:
    """Whether the process has had its memory locked (mlockall): the system then takes nothing back."""
    status = Path("/proc/self/status")
    locked = re.search(r"^VmLck:\s+(\d+)", status.read_text(), re.MULTILINE) if status.exists() else None
    return locked is not None and int(locked[1]) > 0


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """Memory that is written to meanwhile is taken page by page. Where an allocator asks for huge pages, as mimalloc
    does, the first byte takes all of one, 2 MiB, and what the allocator leaves free between tensors is taken too.

    It holds for the whole process, and Linux passes it on: a child that is forked meanwhile keeps it for good, also
    through exec, and has no huge pages. So nothing may be started inside."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux's
    zero = ctypes.c_ulong(0)
    # A system that does not let a process choose takes more memory, and that is all.
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


def gather_pages(storage: torch.UntypedStorage) -> str:
    """Put what is inside of host memory into huge pages, which are faster to read, as the allocator would have had it.
    Says why the pages stay as they are, if the system does not do it; empty where it does, or has no huge pages at all,
    or the memory is too small for one."""
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
    known = ", which Linux knows from 6.1 on" if number == errno.EINVAL else ""
    return f"MADV_COLLAPSE{known}: {os.strerror(number)}"


@cache
def _huge_pages_of_system() -> str:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:  # a kernel without them
        return "[never]"


def whole_pages(start: int, end: int) -> tuple[int, int]:
    """Of these addresses, those of pages that are all inside; may be empty, with an end before the start."""
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
