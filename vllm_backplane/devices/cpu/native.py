"""The C++ kernels of the CPU device: a shared library that registers itself with PyTorch when loaded."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from vllm_backplane.errors import BackplaneError
from vllm_backplane.ops.linear import blocked

LIBRARY_NAME = "libbackplane_cpu.so"
_TYPE_CODES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of the library's own list."""
_PATH = Path(__file__).with_name(LIBRARY_NAME)


def built() -> bool:
    return _PATH.exists()


@cache
def load() -> bool:
    """Whether the library was built, and then it is loaded. One that is there and does not load is an error: whoever
    built it counts on it."""
    if not built():
        return False
    try:
        torch.ops.load_library(str(_PATH))
    except OSError as error:
        raise BackplaneError(
            f"the CPU kernel library cannot be loaded ({error}); it was built for another PyTorch: reinstall with "
            "pip install --force-reinstall --no-deps ."
        ) from error
    return True


def fault() -> tuple[str, str] | None:
    """(what is wrong, remedy), or None when the kernels are there."""
    if load():
        return None
    return (
        "the CPU kernel library was not built, so every operator runs as its plain-PyTorch reference",
        "install a C++ compiler and reinstall: pip install --force-reinstall --no-deps .",
    )


@cache
def library() -> ctypes.CDLL:
    """Its C functions, once it is loaded."""
    return ctypes.CDLL(str(_PATH))


def wants_blocks(dtype: torch.dtype) -> bool:
    """Whether weights of this type are multiplied faster in blocks than by PyTorch's own product."""
    return load() and dtype in _TYPE_CODES and bool(library().backplane_cpu_wants_blocks(_TYPE_CODES.index(dtype)))


def arranged(weight: torch.Tensor) -> torch.Tensor:
    """The weight in the blocks that the kernels of this machine read; 16-bit ones lie in pairs."""
    lanes = 0 if weight.dtype == torch.float32 else library().backplane_cpu_block_lanes()
    return blocked(weight, library().backplane_cpu_block_width(), lanes)
