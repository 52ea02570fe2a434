"""The C++ kernels of the CPU device: a shared library that registers itself with PyTorch when loaded."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from vllm_backplane.device import CodeLayout
from vllm_backplane.errors import BackplaneError, DeviceUnavailable
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


def has_tiles() -> bool:
    """Whether attention of many bfloat16 queries uses the processor's tiles (AMX)."""
    return load() and bool(library().backplane_cpu_has_tiles())


def quantized_layout() -> CodeLayout | None:
    """How codes of 8 or 4 bits lie for the products of this machine."""
    if not load():
        return None
    return CodeLayout(library().backplane_cpu_quantized_width(), bool(library().backplane_cpu_quantized_signed()))


def decoded_from(bits: int) -> int:
    """Rows of an input from which quantized weights are decoded to bfloat16 instead; 0: never."""
    return int(library().backplane_cpu_decoded_from(bits))


def known_dot_products() -> tuple[str, ...]:
    """The sets of products of 8-bit numbers that this machine can run, the best first."""
    return tuple(_text("backplane_cpu_known_dot_products").split(","))


def dot_products() -> str:
    """The set in use."""
    return _text("backplane_cpu_dot_products")


def use_dot_products(name: str) -> None:
    """Use a set by its name, or with an empty one the best again. Weights packed for another layout are rearranged
    at every call."""
    if library().backplane_cpu_force_dot_products(name.encode()) != 0:
        known = ", ".join(known_dot_products())
        raise DeviceUnavailable(f"this machine cannot run products with {name!r}; use one of: {known}")


def _text(function: str) -> str:
    call = getattr(library(), function)
    call.restype = ctypes.c_char_p
    return call().decode()
