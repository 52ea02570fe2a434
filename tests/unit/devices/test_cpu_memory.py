"""Tests the host's memory: limits by control groups, peak memory, released pages and huge pages."""

from __future__ import annotations

import ctypes
import mmap
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.host import host_memory
from vllm_backplane.host.cores import control_group_cores
from vllm_backplane.host.host_memory import (
    collapse_to_huge_pages,
    control_group_limits,
    drop_unused_storage,
    process_limits,
    usable_memory,
    without_huge_pages,
)


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_2_limits_count_from_the_own_group_to_the_root(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text("0::/a/b\n")
    _write(root / "a" / "b", memory__max="max\n", memory__current="50\n")
    _write(root / "a", memory__max="1000\n", memory__current="600\n", memory__stat="inactive_file 100\nanon 400\n")
    assert control_group_limits(root, membership) == [(1000, 500)]


def test_version_1_limits_and_its_way_of_writing_no_limit(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/x\n")
    _write(root / "memory" / "x", memory__limit_in_bytes="2048\n", memory__usage_in_bytes="48\n")
    _write(root / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="4096\n")
    assert control_group_limits(root, membership) == [(2048, 48)]


def test_time_that_version_2_grants(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text("0::/a/b\n")
    _write(root / "a" / "b", cpu__max="max 100000\n")
    assert control_group_cores(root, membership) is None
    _write(root / "a", cpu__max="150000 100000\n")
    assert control_group_cores(root, membership) == 1.5


def test_time_that_version_1_grants(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/y\n")
    _write(root / "cpu" / "x", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    _write(root / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert control_group_cores(root, membership) == 0.5


def test_no_control_groups_means_no_limits(tmp_path: Path) -> None:
    assert control_group_limits(tmp_path, tmp_path / "missing") == []


def test_the_machine_is_never_overstated() -> None:
    now, machine = usable_memory(), psutil.virtual_memory()
    assert 0 < now.free <= now.total <= machine.total


def test_a_limit_of_the_process_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests `ulimit -v` and `ulimit -d`, of which the one that leaves less counts."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits = {resource.RLIMIT_AS: unlimited, resource.RLIMIT_DATA: unlimited}
    monkeypatch.setattr(resource, "getrlimit", lambda number: limits[number])
    assert (process_limits(), usable_memory().left_to_process, usable_memory().limit) == ([], None, "")
    used = psutil.Process().memory_info().vms
    limits[resource.RLIMIT_AS] = (used + (1 << 30), resource.RLIM_INFINITY)
    now = usable_memory()
    assert now.limit == "ulimit -v"
    assert now.left_to_process is not None and 0.9 < now.left_to_process / (1 << 30) < 1.1
    limits[resource.RLIMIT_AS] = (used // 2, resource.RLIM_INFINITY)
    assert usable_memory().left_to_process == 0
    limits[resource.RLIMIT_AS], limits[resource.RLIMIT_DATA] = (1 << 60, 1 << 60), (1 << 20, 1 << 20)
    assert (usable_memory().left_to_process, usable_memory().limit) == (0, "ulimit -d")


PEAK = """
import numpy
from vllm_backplane.host.host_memory import own_peak_memory, reset_peak
reset_peak()
start = own_peak_memory()
block = numpy.ones(64 << 20, dtype=numpy.int8)
grown = own_peak_memory()
assert grown - start > 48 << 20
del block
assert own_peak_memory() - start > 48 << 20, "the mark stays when the memory goes"
reset_peak()
assert grown - own_peak_memory() > 48 << 20
"""


@pytest.mark.process
def test_peak_follows_what_was_allocated_and_starts_again() -> None:
    """It runs in a process of its own, because this one has free memory that other tests left."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_the_cache_is_zero_and_costs_nothing_until_it_is_written() -> None:
    device = CpuDevice()
    before = device.own_memory()
    cache = device.zeroed_bytes(1 << 30)
    assert cache.numel() == 1 << 30
    assert device.own_memory() - before < 64 << 20
    assert not cache[:: 1 << 20].any()


@pytest.mark.process
def test_freed_memory_goes_back_to_the_system() -> None:
    """Every second of many blocks is freed, so that the free memory is not at the end of the heap.

    The blocks come from the C library: PyTorch's builds for ARM have an allocator of their own, which returns pages
    when it chooses and cannot be made to.
    """
    program = (
        "import gc, numpy\n"
        "from vllm_backplane.devices.cpu import CpuDevice\n"
        "device = CpuDevice()\n"
        "blocks = [numpy.ones(1 << 13) for _ in range(2000)]\n"  # 64 KiB each, small enough to come from the heap
        "kept = blocks[::2]\n"
        "del blocks\n"
        "gc.collect()\n"
        "before = device.own_memory()\n"
        "device.empty_cache()\n"
        "print(before - device.own_memory())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 40 << 20


def test_memory_is_given_back_when_no_tensor_uses_it() -> None:
    tensor = torch.ones(1 << 20, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    drop_unused_storage(storage)
    assert bool(tensor.all()), "a tensor uses it"
    del tensor
    drop_unused_storage(storage)
    left = torch.empty(0, dtype=torch.uint8).set_(storage)
    assert int(left.sum()) < 2 * mmap.PAGESIZE, "only bytes that share a page with other memory stay"


def test_memory_that_is_locked_stays() -> None:
    storage = torch.ones(1 << 15, dtype=torch.uint8).untyped_storage()
    place, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
    if ctypes.CDLL(None).mlock(place, size) != 0:
        pytest.skip("this process may lock no memory (ulimit -l)")
    try:
        drop_unused_storage(storage)
        assert all(torch.empty(0, dtype=torch.uint8).set_(storage))
    finally:
        ctypes.CDLL(None).munlock(place, size)


def test_pages_that_stay_small_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is made to reject the request, as one without MADV_COLLAPSE does."""
    monkeypatch.setattr(host_memory, "_huge_pages_of_system", lambda: "[madvise]")
    storage = torch.ones(8 << 20, dtype=torch.uint8).untyped_storage()
    monkeypatch.setattr(host_memory, "_COLLAPSE", 9999)
    assert collapse_to_huge_pages(storage) == "MADV_COLLAPSE, which requires Linux 6.1: Invalid argument"
    assert collapse_to_huge_pages(torch.ones(8, dtype=torch.uint8).untyped_storage()) == "", (
        "it is smaller than a huge page"
    )
    monkeypatch.setattr(host_memory, "_huge_pages_of_system", lambda: "[never]")
    assert collapse_to_huge_pages(storage) == ""


def test_huge_pages_are_used_again_afterwards() -> None:
    def refused() -> bool:
        return "THP_enabled:\t0" in Path("/proc/self/status").read_text()

    before = refused()
    with without_huge_pages():
        assert refused()
    assert refused() is before
