"""Compiles the C++ programs of the tests, and caches each result under a hash of everything that it depends on.

The cache is in the user's cache folder, so a fresh clone reuses what another clone has compiled. Programs that are
linked with PyTorch are an exception, because they contain the path of its libraries.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TORCH = Path(torch.__file__).parent
TORCH_INCLUDES = ("-isystem", f"{TORCH}/include", "-isystem", f"{TORCH}/include/torch/csrc/api/include")
TORCH_LIBRARIES = (f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH}/lib")

KEPT = 6
"""Number of results of one name that remain in the cache: compilers and options differ between tests and clones."""


@cache
def compiler() -> tuple[str, ...]:
    """Returns the command of the compiler: $CXX, or the first known compiler that is installed."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in chosen[:1] or ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return (found, *chosen[1:])
    raise AssertionError("no C++ compiler was found; install one, or set CXX to its command")


@cache
def is_clang(command: tuple[str, ...]) -> bool:
    """Returns whether the compiler is Clang."""
    return "clang" in version(command)


@cache
def version(command: tuple[str, ...]) -> str:
    """Returns what the compiler prints for --version."""
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout


def build(
    name: str, arguments: Sequence[str | Path], depends: Iterable[Path], command: tuple[str, ...] | None = None
) -> Path:
    """Returns the file that the compiler makes from `arguments`; takes it from the cache if it is there.

    `depends` names the files and folders whose content affects the result, including all headers.
    """
    command = compiler() if command is None else command
    given = [*command, *map(str, arguments)]
    # PyTorch's folder is part of the key only if the result refers to it. It is often inside the repository.
    described = [word if str(TORCH) in word else word.replace(str(ROOT), "") for word in given]
    state = hashlib.sha256("\0".join([version(command), torch.__version__, *described]).encode())
    for path in sorted(_files(depends)):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = _cache() / f"{name}-{state.hexdigest()[:24]}"
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time, also between processes
        if not result.is_file():
            partial = result.with_suffix(".partial")
            done = subprocess.run(
                [*given, "-o", str(partial)], cwd=folder, capture_output=True, text=True, timeout=1500, check=False
            )
            assert done.returncode == 0, done.stderr[-4000:]
            partial.replace(result)
            _remove_old(name)
        os.utime(result)  # the results that are in use are the latest
    return result


def _remove_old(name: str) -> None:
    """Deletes all but the latest results of this name, except those that are being built."""
    found = [path for path in _cache().glob(f"{name}-*/{name}") if len(path.parent.name) == len(name) + 25]
    for old in sorted(found, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old.parent, ignore_errors=True)


def _files(depends: Iterable[Path]) -> set[Path]:
    found = set()
    for path in depends:
        found |= {file for file in path.iterdir() if file.is_file()} if path.is_dir() else {path}
    return found


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home, "vllm-backplane-tests")
