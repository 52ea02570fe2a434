"""Tests memory, streams, events, copies and errors of the simulated NPU through PyTorch."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import MEMORY

from vllm_backplane import ops
from vllm_backplane.devices.sim import SimDevice
from vllm_backplane.devices.sim.library import driver

CARD = torch.device("bpnpu", 0)
OTHER = torch.device("bpnpu", 1)


@pytest.fixture
def hang():
    """Stops card 0's default stream before its next launch, until it is released."""
    torch.bpnpu.synchronize()
    driver("faults_add", b"hang@launch=1,card=0,stream=0")
    yield lambda: driver("release_hangs", -1)
    driver("release_hangs", -1)
    driver("faults_clear")


@pytest.fixture
def faults():
    """Injects faults, and clears them and the card's failure afterwards."""

    def inject(spec: str) -> None:
        torch.bpnpu.synchronize()
        driver("faults_add", spec.encode())

    yield inject
    driver("faults_clear")
    for card in range(torch.bpnpu.device_count()):
        driver("card_reset", card)


# --- the device -----------------------------------------------------------------------------------------------------


def test_pytorch_knows_it() -> None:
    assert torch.bpnpu.is_available()
    assert torch.bpnpu.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("bpnpu")
    assert torch.get_device_module("bpnpu") is torch.bpnpu
    assert torch.empty(1, device=CARD).is_bpnpu
    assert torch.empty(1).bpnpu().device == CARD
    assert torch.nn.Linear(2, 2).to(CARD).weight.device == CARD
    assert repr(torch.arange(2, device=CARD)) == "tensor([0, 1], device='bpnpu:0')"


def test_the_current_card_is_the_threads_own() -> None:
    assert torch.bpnpu.current_device() == 0
    with torch.bpnpu.device(1):
        assert torch.bpnpu.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.empty(1, device="bpnpu").device == OTHER
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.bpnpu.current_device()))
        thread.start()
        thread.join()
        assert seen == [0]
    assert torch.bpnpu.current_device() == 0
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.bpnpu.set_device(2)
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.empty(1, device="bpnpu:5")


def test_the_module_has_the_usual_surface_and_nothing_else() -> None:
    public = {name: value for name, value in vars(torch.bpnpu).items() if not name.startswith("_")}
    ours = {name: value.__module__ for name, value in public.items() if hasattr(value, "__module__")}
    foreign = [
        name for name, module in ours.items() if module.startswith("vllm_backplane") and module != torch.bpnpu.__name__
    ]
    assert foreign == [], "public names that come from another module"
    usual = (
        "is_available is_initialized init device_count current_device set_device device device_of synchronize "
        "get_device_name get_device_properties can_device_access_peer is_bf16_supported get_amp_supported_dtype "
        "Stream Event current_stream default_stream set_stream stream StreamContext "
        "empty_cache memory_stats memory_allocated max_memory_allocated memory_reserved max_memory_reserved "
        "reset_peak_memory_stats mem_get_info "
        "get_rng_state get_rng_state_all set_rng_state set_rng_state_all manual_seed manual_seed_all seed initial_seed"
    )
    assert [name for name in usual.split() if name not in public] == []


def test_properties_of_a_card() -> None:
    shown = torch.bpnpu.get_device_properties(1)
    assert (shown.name, shown.total_memory) == (torch.bpnpu.get_device_name(1), MEMORY)
    assert shown.multi_processor_count >= 1
    assert torch.bpnpu.can_device_access_peer(0, 1)
    assert not torch.bpnpu.can_device_access_peer(1, 1)
    with pytest.raises(ValueError, match="bpnpu:2 does not exist"):
        torch.bpnpu.can_device_access_peer(0, 2)
    with torch.bpnpu.device_of(torch.ones(1, device=OTHER)):
        assert torch.bpnpu.current_device() == 1
        with torch.bpnpu.device_of(torch.ones(1)):
            assert torch.bpnpu.current_device() == 1
    assert torch.bpnpu.current_device() == 0


EARLY = """
import torch
from vllm_backplane.devices.sim import SimDevice
from vllm_backplane.devices.sim.library import runtime

device = SimDevice({"memory": 64 << 20, "threads": 1})
device.load()
torch.bpnpu.synchronize()
device.synchronize()
assert not runtime("started"), "waiting for nothing must not start the driver"
for wait in (torch.bpnpu.synchronize, device.synchronize):
    begin, end = (torch.bpnpu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    end.record()
    wait()
    assert end.query()
    assert begin.elapsed_time(end) >= 0
"""


@pytest.mark.process
def test_synchronizing_waits_also_before_the_first_tensor() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_autocast() -> None:
    a = torch.ones(4, 4, device=CARD)
    with torch.autocast("bpnpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16


def test_gradients() -> None:
    weight = torch.ones(3, 2, device=CARD, requires_grad=True)
    (torch.arange(6.0, device=CARD).view(2, 3) @ weight).square().sum().backward()
    host = torch.ones(3, 2, requires_grad=True)
    (torch.arange(6.0).view(2, 3) @ host).square().sum().backward()
    assert torch.equal(weight.grad.cpu(), host.grad)


def test_saving_and_loading() -> None:
    shared = torch.arange(6.0, device=CARD)
    file = io.BytesIO()
    torch.save({"a": shared, "b": shared[2:].view(2, 2), "c": torch.ones(2, device=OTHER)}, file)
    for where, expected in ((None, (CARD, OTHER)), ("cpu", (torch.device("cpu"),) * 2), ("bpnpu:1", (OTHER,) * 2)):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert (loaded["a"].device, loaded["c"].device) == expected
        assert loaded["b"].tolist() == [[2, 3], [4, 5]]
        loaded["a"].zero_()
        assert loaded["b"].sum().item() == 0, "what shared memory does so after loading"


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_counted() -> None:
    torch.bpnpu.empty_cache()
    before = torch.bpnpu.memory_allocated()
    torch.bpnpu.reset_peak_memory_stats()
    a = torch.empty(10 << 20, dtype=torch.uint8, device=CARD)
    assert torch.bpnpu.memory_allocated() - before == 10 << 20
    b = torch.empty(20 << 20, dtype=torch.uint8, device=CARD)
    del a
    assert torch.bpnpu.memory_allocated() - before == 20 << 20
    assert torch.bpnpu.max_memory_allocated() - before == 30 << 20
    assert torch.accelerator.memory_allocated() == torch.bpnpu.memory_allocated()
    assert torch.bpnpu.memory_reserved() >= torch.bpnpu.memory_allocated()
    stats = torch.bpnpu.memory_stats()
    assert stats["allocated_bytes.all.current"] == stats["in_use"] == torch.bpnpu.memory_allocated()
    assert stats["allocated_bytes.all.peak"] == torch.bpnpu.max_memory_allocated()
    assert stats["reserved_bytes.all.current"] == torch.bpnpu.memory_reserved()
    free, total = torch.bpnpu.mem_get_info()
    assert total == MEMORY
    assert free == MEMORY - torch.bpnpu.memory_reserved()
    assert torch.accelerator.get_memory_info() == (free, total)
    del b
    torch.bpnpu.empty_cache()
    assert torch.bpnpu.memory_allocated() == before
    assert torch.bpnpu.mem_get_info()[0] >= free + (20 << 20)


def test_the_device_reports_the_same(device: SimDevice) -> None:
    held = torch.empty(5 << 20, dtype=torch.uint8, device=OTHER)
    assert device.own_memory(1) == torch.bpnpu.memory_allocated(1) >= held.nbytes
    assert device.memory(1).total == MEMORY
    assert device.memory(1).used == device.own_memory(1)
    device.reset_peak_memory(1)
    torch.empty(7 << 20, dtype=torch.uint8, device=OTHER)
    assert device.peak_memory(1) - device.own_memory(1) == 7 << 20


def test_out_of_memory_is_pytorchs_error_and_passes() -> None:
    torch.bpnpu.empty_cache()
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)bpnpu.*free"):
        torch.empty(MEMORY + 1, dtype=torch.uint8, device=CARD)
    assert torch.ones(3, device=CARD).sum().item() == 3


def test_zeros_take_no_memory_of_the_host_until_written() -> None:
    """The kernel's count of the resident pages behind the card is compared."""
    from ctypes import byref, c_uint64

    def resident() -> int:
        torch.bpnpu.synchronize()
        bytes_behind = c_uint64()
        driver("host_resident", 0, byref(bytes_behind))
        return bytes_behind.value

    torch.bpnpu.empty_cache()
    used = torch.ones(64 << 20, dtype=torch.int8, device=CARD)
    high = resident()
    used.zero_()
    assert high - resident() > 60 << 20
    assert not used.any().item()
    used[5 << 20] = 1
    assert used.sum().item() == 1


@pytest.mark.process
def test_the_host_cannot_read_the_memory() -> None:
    import ctypes

    held = torch.ones(100, device=CARD)
    torch.bpnpu.synchronize()
    child = os.fork()
    if child == 0:  # it must die of this
        ctypes.string_at(held.data_ptr(), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV


STRAY = """
import ctypes, faulthandler, sys
import torch
from vllm_backplane.devices.sim import SimDevice

device = SimDevice({"memory": 64 << 20, "threads": 1})
device.load()
held = torch.ones(100, device="bpnpu:1")
torch.bpnpu.synchronize(1)
faulthandler.enable()
getattr(device, sys.argv[1])(1)
ctypes.string_at(held.data_ptr() + 40, 4)
"""


@pytest.mark.parametrize("called", ["set_current", "prepare_worker"])
@pytest.mark.process
def test_a_stray_access_is_explained_although_faulthandler_came_later(called: str) -> None:
    done = subprocess.run([sys.executable, "-c", STRAY, called], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGSEGV
    assert re.search(r"the host accessed the device address .* byte 40 of .* of 400 bytes on card 1\.", done.stderr)
    assert "tensor.cpu()" in done.stderr
    assert re.search(r"Fatal Python error: Segmentation fault(.|\n)*in string_at", done.stderr), "a traceback follows"


def test_resizing_keeps_what_is_there() -> None:
    a = torch.arange(4.0, device=CARD)
    a.resize_(100)
    assert a[:4].tolist() == [0, 1, 2, 3]
    a.untyped_storage().resize_(2000)
    assert a[:4].tolist() == [0, 1, 2, 3]


# --- asynchrony -----------------------------------------------------------------------------------------------------


def test_a_launch_returns_before_it_ran(hang) -> None:
    a = torch.zeros(3, device=CARD)
    b = a + 1
    done = torch.bpnpu.Event()
    done.record()
    assert not done.query()
    assert not torch.bpnpu.current_stream().query()
    hang()
    done.synchronize()
    assert done.query()
    assert b.tolist() == [1, 1, 1]


def test_pinned_copies_are_asynchronous_and_arrive(hang) -> None:
    target = torch.zeros(3, pin_memory=True)
    source = torch.ones(3, device=OTHER).to(CARD) * 7  # the launch that hangs
    target.copy_(source, non_blocking=True)
    assert target.tolist() == [0, 0, 0], "it cannot have arrived"
    threading.Timer(0.2, hang).start()
    torch.bpnpu.synchronize()
    assert target.tolist() == [7, 7, 7]


def test_reading_waits(hang) -> None:
    a = torch.zeros(3, device=CARD) + 5
    threading.Timer(0.2, hang).start()
    assert a.sum().item() == 15
    assert a.cpu().tolist() == [5, 5, 5]


def test_host_memory_may_be_changed_after_a_blocking_copy(hang) -> None:
    pageable, pinned = torch.ones(8), torch.ones(8, pin_memory=True)
    blocked = torch.zeros(8, device=CARD) + 1  # the launch that hangs
    from_pageable = pageable.to(CARD)
    pageable.zero_()
    threading.Timer(0.2, hang).start()
    from_pinned = pinned.to(CARD)
    pinned.zero_()
    assert from_pageable.sum().item() == from_pinned.sum().item() == blocked.sum().item() == 8


def test_a_pinned_source_that_is_gone_was_still_copied(hang) -> None:
    blocked = torch.zeros(8, device=CARD) + 1
    got = torch.full((1000,), 3.0, pin_memory=True).to(CARD, non_blocking=True)
    again = torch.full((1000,), 4.0, pin_memory=True)
    hang()
    assert got.sum().item() == 3000
    assert again.sum() == 4000
    assert blocked.sum().item() == 8


def test_scalars_of_the_host_are_taken_at_the_call(hang) -> None:
    a = torch.zeros(3, device=CARD)
    two = torch.tensor(2.0)
    b = a + two
    two.fill_(9)
    hang()
    assert b.tolist() == [2, 2, 2]


def test_freed_memory_is_not_taken_from_work_in_flight(hang) -> None:
    a = torch.ones(1 << 16, device=CARD)
    b = a + 1  # hangs
    place = a.data_ptr()
    del a
    c = torch.full((1 << 16,), 5.0, device=CARD)
    assert c.data_ptr() == place, "the same stream may have it again at once"
    side = torch.bpnpu.Stream()
    with torch.bpnpu.stream(side):
        others = [torch.full((1 << 16,), 6.0, device=CARD) for _ in range(3)]
    hang()
    assert b.sum().item() == 2 << 16
    assert c.sum().item() == 5 << 16
    side.synchronize()
    assert all(other.sum().item() == 6 << 16 for other in others)


def test_streams_run_beside_each_other_and_wait_for_events(hang) -> None:
    a = torch.zeros(3, device=CARD) + 1  # hangs on the default stream
    recorded = torch.bpnpu.Event()
    recorded.record()
    side = torch.bpnpu.Stream()
    with torch.bpnpu.stream(side):
        assert torch.bpnpu.current_stream() == side
        free = torch.ones(3, device=CARD) * 2
        side.synchronize()
        assert free.tolist() == [2, 2, 2], "another stream does not wait"
        side.wait_event(recorded)
        b = a * 10
        assert not side.query()
    assert torch.bpnpu.current_stream() == torch.bpnpu.default_stream()
    hang()
    side.synchronize()
    assert b.tolist() == [10, 10, 10]


def test_a_missing_synchronization_reads_stale_data(hang) -> None:
    """A device in host memory would hide this mistake."""
    total = torch.zeros(4, pin_memory=True)
    values = torch.zeros(4, device=CARD) + 3
    total.copy_(values, non_blocking=True)
    assert total.sum() == 0
    hang()
    torch.bpnpu.synchronize()
    assert total.sum() == 12


def test_timing_events() -> None:
    start, end = torch.bpnpu.Event(enable_timing=True), torch.bpnpu.Event(enable_timing=True)
    start.record()
    torch.randn(200, 200, device=CARD) @ torch.randn(200, 200, device=CARD)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_launches_use_the_threads_that_were_set(device: SimDevice) -> None:
    a = torch.randn(64, 64, device=CARD)
    for threads in (1, 2):
        device.settings = {**device.settings, "threads": threads}
        device.prepare_worker(1)
        torch.testing.assert_close((a @ a).cpu(), a.cpu() @ a.cpu())


# --- cards ----------------------------------------------------------------------------------------------------------


def test_copies_between_cards_are_in_order(hang) -> None:
    a = torch.zeros(1000, device=CARD) + 4  # hangs
    b = a.to(OTHER)
    c = b * 2
    strided = torch.zeros(10, 100, device=OTHER)
    strided.t().copy_(a.view(100, 10), non_blocking=True)
    assert not torch.bpnpu.current_stream(1).query()
    hang()
    assert c.sum().item() == 8000
    assert strided.sum().item() == 4000
    assert c.device == OTHER


# --- faults ---------------------------------------------------------------------------------------------------------


def test_an_allocation_that_fails(faults) -> None:
    faults("oom@alloc=2")
    torch.empty(5, device=CARD)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5, device=CARD)
    assert torch.ones(5, device=CARD).sum().item() == 5


def test_a_launch_that_fails_is_reported_at_the_next_wait(faults) -> None:
    faults("fail@launch=aten::mul*")
    a = torch.ones(3, device=CARD)
    a.mul_(2)
    with pytest.raises(torch.AcceleratorError, match=r"aten::mul\.out"):
        torch.bpnpu.synchronize()
    with pytest.raises(RuntimeError, match=r"aten::mul\.out"):
        a.sum().item()


def test_a_kernel_that_raises_is_reported_with_its_message(faults) -> None:
    a = torch.ones(3, device=CARD)
    bad = a[torch.tensor([7], device=CARD)]
    with pytest.raises(torch.AcceleratorError, match=r"index 7 is out of bounds"):
        bad.cpu()


def test_a_stream_that_hangs_ends_in_a_timeout(faults) -> None:
    driver("set_sync_timeout", 300)
    try:
        faults("hang@launch=1")
        a = torch.ones(3, device=CARD) + 1
        began = time.monotonic()
        with pytest.raises(torch.AcceleratorError, match=r"(?i)hang|time"):
            a.sum().item()
        assert time.monotonic() - began < 15
    finally:
        driver("release_hangs", -1)
        driver("set_sync_timeout", 30000)


def test_corrupted_results_are_wrong_and_nothing_else(faults) -> None:
    faults("corrupt@launch=aten::mul*,kind=nan")
    a = torch.ones(100, device=CARD) * 2
    assert a.isnan().sum().item() == 1


def test_a_corrupted_cache_write_strikes_a_row_that_was_written(faults) -> None:
    cache = torch.zeros(64, 2, 4, 16, device=CARD)
    new = torch.ones(2, 2, 8, device=CARD)
    slots = torch.tensor([-1, 37]).to(CARD)
    faults("corrupt@launch=backplane::kv_cache_write,kind=nan")
    ops.kv_cache_write.call(new, new, cache[..., :8], cache[..., 8:], slots, 1.0, 1.0)
    assert cache.isnan().sum().item() == 1
    assert cache[37 // 4, :, 37 % 4].isnan().sum().item() == 1


@pytest.mark.process
def test_a_fork_after_the_first_tensor_is_reported() -> None:
    torch.ones(1, device=CARD)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing happened"
        try:
            torch.ones(1, device=CARD)
        except RuntimeError as fault:
            text = f"{torch.bpnpu._is_in_bad_fork()} {fault}"
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    assert output.startswith("True")
    assert "spawn" in output
