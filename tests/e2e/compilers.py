"""Detects whether a program compiles anything.

The program gets fake compilers, which log their calls and fail, and empty caches for the code that PyTorch, vLLM and
Triton would compile.
"""

from __future__ import annotations

import os
from pathlib import Path

NAMES = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cpp", "as", "ld", "nvcc", "ninja", "cmake", "make")
FAKE_COMPILER = '#!/bin/sh\necho "$0 $*" >> "{calls}"\nexit 1\n'


class Compilers:
    """Makes a folder with fake compilers and empty caches; `variables` makes a program use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        tools = folder / "tools"
        tools.mkdir(parents=True)
        for name in NAMES:
            (tools / name).write_text(FAKE_COMPILER.format(calls=self._calls))
            (tools / name).chmod(0o755)
        self._caches = {
            "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
            "TRITON_CACHE_DIR": folder / "triton",
            "NUMBA_CACHE_DIR": folder / "numba",
        }
        self._vllm = folder / "vllm"
        self._vllm.mkdir()
        # vLLM's cache of information about model classes is shared: it contains no compiled code, and filling it takes
        # a process and seconds.
        home = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        known = Path(os.environ.get("VLLM_CACHE_ROOT", f"{home}/vllm")) / "modelinfos"
        known.mkdir(parents=True, exist_ok=True)
        (self._vllm / known.name).symlink_to(known)
        self.variables = {
            "PATH": os.pathsep.join((str(tools), os.environ["PATH"])),
            "CC": str(tools / "cc"),
            "CXX": str(tools / "c++"),
            "VLLM_CACHE_ROOT": str(self._vllm),
            **{name: str(cache) for name, cache in self._caches.items()},
        }

    def traces(self) -> list[str]:
        """Returns the logged calls of compilers, and the files in the caches."""
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        # ctypes finds some libraries by running a linker that traces its search.
        calls = [call for call in calls if "-Wl,-t" not in call.split() and "-t" not in call.split()]
        found = [file for cache in self._caches.values() for file in cache.rglob("*") if file.is_file()]
        found += [file for file in self._vllm.rglob("torch_compile_cache/**/*") if file.is_file()]
        return [*calls, *map(str, found)]
