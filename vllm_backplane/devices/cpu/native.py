"""The C++ kernels of the CPU device: a shared library that registers itself with PyTorch when loaded."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from vllm_backplane.errors import DeviceUnavailable
from vllm_backplane.ops.linear import blocked

LIBRARY_NAME = "libbackplane_cpu.so"
_TYPE_CODES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of the library's own list."""
_PATH = Path(__file__).with_name(LIBRARY_NAME)


def load() -> None:
    """Load the library if it was built; what is missing is told by `fault` and shown by doctor and at start."""
    fault()


@cache
def fault() -> tuple[str, str] | None:
    """(what is wrong, remedy), or None when the kernels are there and loaded."""
    if not _PATH.exists():
        return (
            "the CPU kernel library was not built, so every operator runs as its plain-PyTorch reference",
            "install a C++ compiler and reinstall: pip install --force-reinstall --no-deps .",
        )
    try:
        torch.ops.load_library(str(_PATH))
    except OSError as error:
        return (
            f"the CPU kernel library cannot be loaded ({error})",
            "it was built for another PyTorch; reinstall: pip install --force-reinstall --no-deps .",
        )
    return None


def wants_blocks(dtype: torch.dtype) -> bool:
    """Whether weights of this type are multiplied faster in blocks than by PyTorch's own product."""
    return (
        fault() is None
        and dtype in _TYPE_CODES
        and bool(ctypes.CDLL(str(_PATH)).backplane_cpu_wants_blocks(_TYPE_CODES.index(dtype)))
    )


def arranged(weight: torch.Tensor) -> torch.Tensor:
    """The weight in the blocks that the kernels of this machine read; 16-bit ones lie in pairs."""
    library = ctypes.CDLL(str(_PATH))
    lanes = 0 if weight.dtype == torch.float32 else library.backplane_cpu_block_lanes()
    return blocked(weight, library.backplane_cpu_block_width(), lanes)


def quantized_width() -> int | None:
    """Output features in a block of 8- or 4-bit weights, as the products of this machine read them."""
    return None if fault() is not None else int(ctypes.CDLL(str(_PATH)).backplane_cpu_quantized_width())


def known_dot_products() -> tuple[str, ...]:
    """The sets of products of 8-bit numbers that this machine can run, the best first."""
    return tuple(_text("backplane_cpu_known_dot_products").split(","))


def dot_products() -> str:
    """The set in use."""
    return _text("backplane_cpu_dot_products")


def use_dot_products(name: str) -> None:
    """Use a set by its name, or with an empty one the best again. Weights packed for another width are rearranged at
    every call."""
    library = ctypes.CDLL(str(_PATH))
    if library.backplane_cpu_force_dot_products(name.encode()) != 0:
        known = ", ".join(known_dot_products())
        raise DeviceUnavailable(f"this machine cannot run products with {name!r}; use one of: {known}")


def _text(function: str) -> str:
    call = getattr(ctypes.CDLL(str(_PATH)), function)
    call.restype = ctypes.c_char_p
    return call().decode()
