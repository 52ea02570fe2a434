"""The C++ kernels of the CPU device: a shared library that registers itself with PyTorch when loaded."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

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


def block_width(dtype: torch.dtype) -> int:
    """Rows of a block of weights of this type that the kernels want; 0 where PyTorch's own product is faster."""
    if fault() is not None or dtype not in _TYPE_CODES:
        return 0
    library = ctypes.CDLL(str(_PATH))
    wanted = library.backplane_cpu_wants_blocks(_TYPE_CODES.index(dtype))
    return int(library.backplane_cpu_block_width()) if wanted else 0
