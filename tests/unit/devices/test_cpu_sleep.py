"""Tests sleep mode on the CPU: pages go back to the system, tensors keep their addresses, saved contents return."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from vllm_backplane.device import MemoryInfo
from vllm_backplane.devices.cpu import CpuDevice, sleep
from vllm_backplane.devices.cpu import device as cpu_device
from vllm_backplane.devices.cpu.sleep import SMALLEST, Mapping, SleepPool, anonymous_ranges, folder_on_disk
from vllm_backplane.errors import BackplaneError
from vllm_backplane.host import host_memory, memory_ledger
from vllm_backplane.host.memory_ledger import MemoryLedger

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> SleepPool:
    return SleepPool(lambda: tmp_path)


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryLedger:
    """Returns a ledger that replaces the user's, where other processes may change their reservations meanwhile."""
    own = MemoryLedger(tmp_path / "ledger")
    for module in (cpu_device, sleep):
        monkeypatch.setattr(module, "ledger", own)
    return own


def resident() -> int:
    return host_memory.own_resident_memory()


def test_what_is_kept_comes_back_to_where_it_was(pool: SleepPool) -> None:
    with pool.in_use():
        weights = torch.nn.Linear(4096, 4096)  # 64 MiB
        arranged = weights.weight.detach().t().contiguous()
    view = weights.weight[7, 1000:2000]
    expected = [weights.weight.detach().clone(), arranged.clone(), view.detach().clone()]
    places = weights.weight.data_ptr(), arranged.data_ptr()
    before = resident()
    pool.release(keep=True)
    asleep = resident()
    assert before - asleep > 0.95 * (weights.weight.nbytes + arranged.nbytes)
    assert not arranged.flatten()[2000:-2000].any(), "whole pages stay mapped, and empty"
    pool.restore()
    assert places == (weights.weight.data_ptr(), arranged.data_ptr())
    assert all(map(torch.equal, (weights.weight, arranged, view), expected))
    # The total may be lower than before, because memory that was free before the release went back as well.
    assert resident() - asleep > 0.95 * (weights.weight.nbytes + arranged.nbytes)


def test_what_is_not_kept_does_not(pool: SleepPool, tmp_path: Path) -> None:
    with pool.in_use():
        large, small = torch.ones(MIB), torch.ones(SMALLEST // 4 - 1)
    pool.release(keep=False)
    pool.restore()
    assert not large[2000:-2000].any()
    assert small.all(), "it is smaller than SMALLEST"
    large.fill_(3)
    assert (large == 3).all()


def test_only_what_was_made_meanwhile_and_lives_sleeps(pool: SleepPool) -> None:
    before = torch.ones(MIB)
    with pool.in_use():
        mine, gone = torch.ones(MIB), torch.ones(MIB)
        freed_while_asleep = torch.ones(MIB)
    after = torch.ones(MIB)
    del gone
    others = torch.ones(MIB)  # perhaps at the same address
    pool.release(keep=True)
    del freed_while_asleep
    reused = torch.full((MIB,), 2.0)
    assert before.all() and after.all() and others.all()
    pool.restore()
    assert mine.all() and (reused == 2).all()


def test_nothing_is_lost_where_it_cannot_be_written(pool: SleepPool, tmp_path: Path) -> None:
    with pool.in_use():
        weights = torch.ones(MIB)
    pool._folder = lambda: tmp_path / "gone"
    with pytest.raises(BackplaneError, match=r"cannot be written to .*gone.*BACKPLANE_CPU_SLEEP_FOLDER"):
        pool.release(keep=True)
    assert weights.all()


def test_a_full_disk_is_found_before_anything_is_lost(pool: SleepPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool.in_use():
        weights = torch.ones(MIB)

    def full(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BackplaneError, match=r"No space left on device.*make room"):
        pool.release(keep=True)
    assert weights.all()


def test_pages_that_the_system_does_not_take_leave_all_as_it_was(
    pool: SleepPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool.in_use():
        first, second = torch.ones(MIB), torch.ones(MIB)
    dropped: list[int] = []

    def drop(start: int, length: int, original: Callable[[int, int], None] = host_memory.drop_pages) -> None:
        if dropped:
            raise BackplaneError("refused")
        dropped.append(start)
        original(start, length)

    monkeypatch.setattr(host_memory, "drop_pages", drop)
    with pytest.raises(BackplaneError, match="refused"):
        pool.release(keep=True)
    assert first.all() and second.all()


def test_waking_waits_for_memory(pool: SleepPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool.in_use():
        weights = torch.ones(MIB)
    pool.release(keep=True)
    with monkeypatch.context() as little:
        little.setattr(host_memory, "usable_memory", lambda: MemoryInfo(total=64 << 30, free=MIB))
        with pytest.raises(BackplaneError, match=r"waking up needs 0\.00 GiB .* wake up again"):
            pool.restore()
    pool.restore()
    assert weights.all()


def test_pages_of_a_file_are_left_alone(pool: SleepPool, tmp_path: Path) -> None:
    """Other processes may share the pages, and some files cannot be written to."""
    file = tmp_path / "weights"
    file.write_bytes(numpy.ones(MIB, dtype=numpy.float32).tobytes())
    mapped = torch.from_numpy(numpy.memmap(file, dtype=numpy.float32, mode="c"))
    mapped[:MIB] *= 2
    with pool.in_use():
        part = mapped[: MIB // 2].view(-1)
    pool.release(keep=False)
    pool.restore()
    assert (part == 2).all()


def test_the_cache_of_the_device_sleeps_with_its_reservation(tmp_path: Path, ledger: MemoryLedger) -> None:
    device = CpuDevice({"sleep_folder": str(tmp_path)})
    count = 64 * MIB
    with device.sleep_pool("cache"):
        cache = device.zeroed_bytes(count)
    assert ledger.unwritten_bytes() > 0.9 * count
    cache.fill_(1)
    before = resident()
    device.release("cache", keep=False)
    assert before - resident() > 0.95 * count
    assert ledger.unwritten_bytes() == 0, "other processes may use it"
    device.restore("cache")
    assert ledger.unwritten_bytes() > 0.9 * count
    assert not cache[MIB:-MIB].any()


def test_a_reservation_that_is_refused_on_waking_is_not_made_twice(
    tmp_path: Path, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests two caches for which there is memory when waking begins, and for one of them when it ends."""
    device = CpuDevice({"sleep_folder": str(tmp_path)})
    with device.sleep_pool("cache"):
        caches = [device.zeroed_bytes(64 * MIB) for _ in range(2)]
    device.release("cache", keep=False)
    free = iter([1024 * MIB, 96 * MIB, 32 * MIB])
    with monkeypatch.context() as little:
        memory = lambda: MemoryInfo(total=64 << 30, free=next(free))  # noqa: E731
        little.setattr(host_memory, "usable_memory", memory)
        little.setattr(memory_ledger, "usable_memory", memory)
        with pytest.raises(BackplaneError, match=r"a KV cache of .* does not fit.*wake up again"):
            device.restore("cache")
    device.restore("cache")
    assert 120 * MIB < ledger.unwritten_bytes() <= sum(cache.nbytes for cache in caches)


def test_waking_needs_nothing_more_of_a_limit_of_the_process(
    tmp_path: Path, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CpuDevice({"sleep_folder": str(tmp_path)})
    with device.sleep_pool("cache"):
        cache = device.zeroed_bytes(64 * MIB)
    device.release("cache", keep=False)
    monkeypatch.setattr(host_memory, "process_limits", lambda: [(1 << 30, 1 << 30, "ulimit -v")])
    device.restore("cache")
    assert ledger.unwritten_bytes() > 0.9 * cache.nbytes


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    device = os.stat(tmp_path).st_dev
    file = tmp_path / "mountinfo"
    file.write_text(f"22 1 {os.major(device)}:{os.minor(device)} / / rw - tmpfs none rw\n")
    return file


def test_a_folder_in_memory_is_none(tmp_path: Path, mounts: Path) -> None:
    assert folder_on_disk(str(tmp_path), tmp_path / os.devnull) == tmp_path
    with pytest.raises(BackplaneError, match=r"is in memory \(tmpfs\).*Set BACKPLANE_CPU_SLEEP_FOLDER"):
        folder_on_disk(str(tmp_path), mounts)


def test_a_folder_that_is_none_is_rejected_before_weights_are_loaded(tmp_path: Path) -> None:
    device = CpuDevice({"sleep_folder": str(tmp_path / "nothing")})
    with pytest.raises(BackplaneError, match="nothing is not a folder"), device.sleep_pool("weights"):
        pass


def test_parts_of_mappings() -> None:
    own, file = (lambda start, end: Mapping(start, end, True)), (lambda start, end: Mapping(start, end, False))
    mappings = [own(0, 10), file(10, 20), own(20, 30), own(30, 40), file(50, 60)]
    assert list(anonymous_ranges(mappings, 5, 35)) == [(5, 10), (20, 30), (30, 35)]
    assert list(anonymous_ranges(mappings, 12, 18)) == []
    assert list(anonymous_ranges(mappings, 30, 30)) == []
    assert list(anonymous_ranges(mappings, 45, 55)) == []


def test_own_mappings_know_memory_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(mmap.PAGESIZE))
    with (tmp_path / "file").open("r+b") as opened, mmap.mmap(opened.fileno(), mmap.PAGESIZE) as shared:
        of_file = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        of_process = torch.empty(MIB).data_ptr()
        found = {one.start: one for one in sleep.own_mappings()}
        assert not found[of_file].anonymous
        inside = [one for one in found.values() if one.start <= of_process < one.end]
        assert [one.anonymous for one in inside] == [True]
