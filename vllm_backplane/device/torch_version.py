"""Compares the PyTorch that a kernel library was built for with the installed one, before the library is loaded.

A library that is loaded into another PyTorch may fail with an undefined symbol, or load and then read structures that
have another layout. The build writes the version into the library (`setup.py`).
"""

from __future__ import annotations

import mmap
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_backplane.errors import BackplaneError

_BEFORE, _AFTER = b"vllm-backplane: built for PyTorch ", b";"
_LONGEST = 64
REBUILD = "install a C++ compiler and reinstall: pip install --force-reinstall --no-deps ."


def stated_version(library: Path) -> str:
    """Returns the version of PyTorch that a library states, or an empty text if it states none."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        start = contents.find(_BEFORE)
        if start < 0:
            return ""
        start += len(_BEFORE)
        end = contents.find(_AFTER, start, start + _LONGEST)
        return contents[start:end].decode("ascii", "replace") if end > start else ""


def require_same_torch(library: Path, installed: str) -> None:
    """Raises BackplaneError unless `library` was built for the release of PyTorch that is installed.

    Builds of one release for different accelerators ("+cpu", "+cu130") have the same interface.
    """
    try:
        stated = stated_version(library)
    except (OSError, ValueError) as error:
        raise BackplaneError(f"{library.name} cannot be read ({error}); {REBUILD}") from error
    if not stated:
        raise BackplaneError(f"{library.name} does not state which PyTorch it was built for; {REBUILD}")
    if _release(stated) != _release(installed):
        raise BackplaneError(f"{library.name} was built for PyTorch {stated}, and {installed} is installed; {REBUILD}")


def _release(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return version
