"""Notices whether a program compiles something: compilers that only note that they were run, and caches of its own for
what PyTorch, vLLM and Triton would compile."""

from __future__ import annotations

import os
from pathlib import Path

NAMES = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cpp", "as", "ld", "nvcc", "ninja", "cmake", "make")
NOTE = '#!/bin/sh\necho "$0 $*" >> "{notes}"\nexit 1\n'


class Compilers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._notes = folder / "notes"
        tools = folder / "tools"
        tools.mkdir(parents=True)
        for name in NAMES:
            (tools / name).write_text(NOTE.format(notes=self._notes))
            (tools / name).chmod(0o755)
        self._caches = {
            "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
            "TRITON_CACHE_DIR": folder / "triton",
            "NUMBA_CACHE_DIR": folder / "numba",
        }
        self._vllm = folder / "vllm"
        self._vllm.mkdir()
        # What vLLM found out about classes of models is no compilation, and takes a process and seconds.
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
        """Calls of compilers, and files in the caches."""
        called = self._notes.read_text().splitlines() if self._notes.exists() else []
        # ctypes looks for libraries that the system's list does not have by asking a linker to trace its search.
        called = [call for call in called if "-Wl,-t" not in call.split() and "-t" not in call.split()]
        found = [file for cache in self._caches.values() for file in cache.rglob("*") if file.is_file()]
        found += [file for file in self._vllm.rglob("torch_compile_cache/**/*") if file.is_file()]
        return [*called, *map(str, found)]
