"""The C++ kernels of the CPU device: a shared library that registers itself with PyTorch when loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

LIBRARY_NAME = "libbackplane_cpu.so"
_PATH = Path(__file__).with_name(LIBRARY_NAME)


@cache
def load() -> None:
    """Load the library if it was built; what is missing is told by `fault` and shown by doctor and at start."""
    if fault() is None:
        torch.ops.load_library(str(_PATH))


@cache
def fault() -> tuple[str, str] | None:
    """(what is wrong, remedy), or None when the kernels are there."""
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
