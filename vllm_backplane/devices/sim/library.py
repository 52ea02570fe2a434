"""Calls the library of the simulated NPU, which contains driver and runtime, through ctypes.

Loading it registers the device with PyTorch and starts nothing: the driver starts its threads with the first tensor.
ctypes releases the GIL during a call, so no call here makes a launch wait for Python.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_backplane.device.torch_version import REBUILD, require_same_torch
from vllm_backplane.errors import BackplaneError, DeviceUnavailable

LIBRARY_NAME = "libbackplane_sim.so"
PATH = Path(__file__).with_name(LIBRARY_NAME)
CPU_KERNELS = Path(__file__).parents[1] / "cpu" / "libbackplane_cpu.so"
"""The kernel library of the cpu device, which computes behind the driver's launches."""

OK, NOT_READY = 0, 1


class Model(ctypes.Structure):
    _fields_ = (
        ("on", c_int32),
        ("memory_bandwidth", c_double),
        ("link_bandwidth", c_double),
        ("flop_rate", c_double),
        ("launch_overhead_ns", c_double),
    )


class Config(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("cards", c_int32),
        ("memory_bytes", c_uint64),
        ("sync_timeout_ms", c_uint32),
        ("spin_us", c_int32),
        ("check_launches", c_int32),
        ("check_races", c_int32),
        ("fault_handler", c_int32),
        ("model", Model),
        ("faults", c_char_p),
        ("worker_start", c_void_p),
        ("worker_start_arg", c_void_p),
    )


class MemoryStats(ctypes.Structure):
    limit: int
    in_use: int
    in_use_peak: int
    reserved: int
    reserved_peak: int
    suspended: int
    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "limit", "in_use", "in_use_peak", "requested", "reserved", "reserved_peak", "pending", "suspended",
            "largest_free", "allocations", "frees", "out_of_memory", "segments",
        )
    )  # fmt: skip


class Counters(ctypes.Structure):
    launches: int
    copies: int
    graph_launches: int
    dropped: int
    modelled_busy_ns: float
    _fields_ = (
        ("launches", c_uint64),
        ("copies", c_uint64),
        ("graph_launches", c_uint64),
        ("dropped", c_uint64),
        ("modelled_busy_ns", c_double),
    )


class BlockInfo(ctypes.Structure):
    base: int
    bytes: int
    _fields_ = (
        ("place", c_int),
        ("card", c_int32),
        ("base", c_void_p),
        ("bytes", c_uint64),
        ("rounded", c_uint64),
        ("pool", c_uint64),
        ("stream", c_uint64),
    )


_DRIVER: dict[str, tuple[Any, ...]] = {
    "bpsim_memory_statistics": (c_int32, POINTER(MemoryStats)),
    "bpsim_host_resident": (c_int32, POINTER(c_uint64)),
    "bpsim_card_counters": (c_int32, POINTER(Counters)),
    "bpsim_reset_peaks": (c_int32,),
    "bpsim_card_reset": (c_int32,),
    "bpsim_install_fault_handler": (),
    "bpsim_set_sync_timeout": (c_uint32,),
    "bpsim_set_model": (POINTER(Model),),
    "bpsim_check_copies": (c_int32,),
    "bpsim_check_races": (c_int,),
    "bpsim_races_found": (POINTER(c_uint64),),
    "bpsim_faults_add": (c_char_p,),
    "bpsim_faults_check": (c_char_p,),
    "bpsim_faults_clear": (),
    "bpsim_release_hangs": (c_int32,),
    "bpsim_default_stream": (c_int32, POINTER(c_uint64)),
    "bpsim_card_synchronize": (c_int32,),
    "bpsim_copy": (c_uint64, c_int, c_void_p, c_void_p, c_uint64),
    "bpsim_pool_create": (c_int32, POINTER(c_uint64)),
    "bpsim_pool_suspend": (c_uint64,),
    "bpsim_pool_resume": (c_uint64,),
    "bpsim_capture_begin": (c_uint64, c_uint64),
    "bpsim_capture_end": (c_uint64, POINTER(c_uint64)),
    "bpsim_graph_launch": (c_uint64, c_uint64),
    "bpsim_graph_destroy": (c_uint64,),
    "bpsim_blocks": (c_int32, c_uint64, POINTER(BlockInfo), c_uint64, POINTER(c_uint64)),
}
"""Argument types of the driver's functions that return a status."""

# Result and argument types of the runtime's functions.
_RUNTIME: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bpnpu_last_error": (c_char_p, ()),
    "bpnpu_configure": (c_int, (POINTER(Config),)),
    "bpnpu_start": (c_int, ()),
    "bpnpu_started": (c_int, ()),
    "bpnpu_forked_after_start": (c_int, ()),
    "bpnpu_card_count": (c_int, ()),
    "bpnpu_current_card": (c_int, ()),
    "bpnpu_set_current_card": (c_int, (c_int,)),
    "bpnpu_current_stream": (c_uint64, (c_int,)),
    "bpnpu_set_compute_threads": (None, (c_int,)),
    "bpnpu_compute_threads": (c_int, ()),
    "bpnpu_set_fallback": (None, (c_int,)),
    "bpnpu_set_pool": (None, (c_uint64,)),
    "bpnpu_current_pool": (c_uint64, ()),
    "bpnpu_launch_cpu_kernel": (c_int, (c_char_p,)),
    "bpnpu_report": (c_char_p, ()),
    "bpnpu_reset_counters": (None, ()),
}


@cache
def library() -> ctypes.CDLL:
    """Loads the library, which registers the device with PyTorch, and returns its functions."""
    if not PATH.exists():
        raise DeviceUnavailable(f"{LIBRARY_NAME} was not built; {REBUILD}")
    require_same_torch(PATH, torch.__version__)
    try:
        torch.ops.load_library(str(PATH))
        loaded = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise DeviceUnavailable(f"{LIBRARY_NAME} cannot be loaded ({error}); {REBUILD}") from error
    loaded.bpsim_last_error.restype = c_char_p
    for name, arguments in _DRIVER.items():
        getattr(loaded, name).argtypes = arguments
        getattr(loaded, name).restype = c_int
    for name, (result, arguments) in _RUNTIME.items():
        getattr(loaded, name).argtypes = arguments
        getattr(loaded, name).restype = result
    loaded.bpsim_config_default.argtypes = (POINTER(Config),)
    return loaded


def driver(name: str, *arguments: Any) -> None:
    """Calls a function of the driver; raises a BackplaneError with the driver's own text if it fails."""
    loaded = library()
    call: Callable[..., int] = getattr(loaded, f"bpsim_{name}")
    if call(*arguments) not in (OK, NOT_READY):
        raise BackplaneError(f"bpnpu, {name}: {loaded.bpsim_last_error().decode()}")


def runtime(name: str, *arguments: Any) -> Any:
    """Calls a function of the runtime and returns its result; raises a BackplaneError if it is -1, a failure."""
    loaded = library()
    result = getattr(loaded, f"bpnpu_{name}")(*arguments)
    if result == -1:
        raise BackplaneError(f"bpnpu, {name}: {loaded.bpnpu_last_error().decode()}")
    return result


def default_config() -> Config:
    config = Config()
    library().bpsim_config_default(byref(config))
    return config


def memory_stats(card: int) -> MemoryStats:
    stats = MemoryStats()
    runtime("start")
    driver("memory_statistics", card, byref(stats))
    return stats


def synchronize(card: int) -> None:
    """Waits for all work queued on a card; raises its error, if it failed, as an exception of PyTorch."""
    library()
    torch.ops.bpnpu.synchronize(card)


def host_resident(card: int) -> int:
    """Returns the resident bytes of host memory behind a card, as the kernel counts them. It is slow and for tests."""
    count = c_uint64()
    driver("host_resident", card, byref(count))
    return count.value


def races_found() -> int:
    """Returns how many missing synchronizations were found since the start, if the option ``races`` is on."""
    count = c_uint64()
    driver("races_found", byref(count))
    return count.value


def counters(card: int) -> Counters:
    counted = Counters()
    runtime("start")
    driver("card_counters", card, byref(counted))
    return counted


def operator_report() -> dict[str, Any]:
    """Returns the calls of each operator: "launched", "waited" (the host waited for the size of the result) and
    "fell_back" (it ran on the host); and the names of the operators that are "implemented" on the card."""
    report: dict[str, Any] = json.loads(runtime("report"))
    return report
