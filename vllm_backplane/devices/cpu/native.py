"""Loads the C++ kernels of the CPU device, a shared library that registers its kernels with PyTorch when loaded."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from vllm_backplane.device import CodeLayout
from vllm_backplane.device.torch_version import REBUILD, require_same_torch
from vllm_backplane.errors import BackplaneError, DeviceUnavailable
from vllm_backplane.ops.linear import blocked

LIBRARY_NAME = "libbackplane_cpu.so"
_TYPE_CODES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in the order of the library's own numbers for them."""
_PATH = Path(__file__).with_name(LIBRARY_NAME)


def built() -> bool:
    """Returns whether the library was built."""
    return _PATH.exists()


@cache
def load() -> bool:
    """Loads the library if it was built, and returns whether it was.

    A library that exists and does not load is an error rather than a fallback to the references, because a user who
    built it expects it to be used.
    """
    if not built():
        return False
    require_same_torch(_PATH, torch.__version__)
    try:
        torch.ops.load_library(str(_PATH))
    except OSError as error:
        raise BackplaneError(f"the CPU kernel library cannot be loaded ({error}); {REBUILD}") from error
    return True


def fault() -> tuple[str, str] | None:
    """Returns (problem, remedy) if the library was not built, else None."""
    if load():
        return None
    return (
        "the CPU kernel library was not built, so every operator runs as its plain-PyTorch reference",
        REBUILD,
    )


@cache
def library() -> ctypes.CDLL:
    """Returns the library's C functions. The library must have been loaded."""
    return ctypes.CDLL(str(_PATH))


def wants_blocks(dtype: torch.dtype) -> bool:
    """Returns whether the blocked GEMM is faster than PyTorch's own for weights of this dtype."""
    return load() and dtype in _TYPE_CODES and bool(library().backplane_cpu_wants_blocks(_TYPE_CODES.index(dtype)))


def to_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight in the blocked layout of this machine's kernels; rows of 16-bit weights are paired."""
    lanes = 0 if weight.dtype == torch.float32 else library().backplane_cpu_block_lanes()
    return blocked(weight, library().backplane_cpu_block_width(), lanes)


def read_memory(memory: torch.Tensor, threads: int) -> None:
    """Reads all bytes of a contiguous tensor once, each of the threads a part of them."""
    part = -(-memory.nbytes // (64 * threads)) * 64

    def read(thread: int) -> None:
        begin, end = (min(place * part, memory.nbytes) for place in (thread, thread + 1))
        address = ctypes.c_void_p(memory.data_ptr() + begin)
        library().backplane_cpu_read_memory(address, ctypes.c_int64(end - begin))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def has_amx_tiles() -> bool:
    """Returns whether attention of many bfloat16 queries uses the processor's AMX tiles."""
    return load() and bool(library().backplane_cpu_has_tiles())


def quantized_layout() -> CodeLayout | None:
    """Returns the layout of 8- and 4-bit codes for the dot-product kernels of this machine."""
    if not load():
        return None
    return CodeLayout(library().backplane_cpu_quantized_width(), bool(library().backplane_cpu_quantized_signed()))


def dequantizing_rows(bits: int) -> int:
    """Returns the number of input rows from which weights are dequantized to bfloat16 before the GEMM; 0: never."""
    return int(library().backplane_cpu_decoded_from(bits))


def available_dot_kernels() -> tuple[str, ...]:
    """Returns the names of the 8-bit dot-product kernels that this machine can run, the fastest first."""
    return tuple(_text("backplane_cpu_known_dot_products").split(","))


def dot_kernel() -> str:
    """Returns the name of the 8-bit dot-product kernel in use."""
    return _text("backplane_cpu_dot_products")


def use_dot_kernel(name: str) -> None:
    """Switches to a dot-product kernel by its name; an empty name selects the fastest.

    Weights that are packed for another layout are rearranged at every call.
    """
    if library().backplane_cpu_force_dot_products(name.encode()) != 0:
        known = ", ".join(available_dot_kernels())
        raise DeviceUnavailable(f"this machine cannot run the dot-product kernel {name!r}; use one of: {known}")


def _text(function: str) -> str:
    call = getattr(library(), function)
    call.restype = ctypes.c_char_p
    return call().decode()
