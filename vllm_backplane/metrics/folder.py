"""Provides the folder of a server for the values of its processes, and removes those of servers that have ended.

The process that makes vLLM's configuration creates the folder and holds a lock on it, as do the processes that are
forked from it. A folder whose lock nobody holds is stale: its server was killed. The next server removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import logging
import multiprocessing
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_backplane.errors import BackplaneError
from vllm_backplane.guards import guarded
from vllm_backplane.private_folder import private_folder

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only

TREE = "_BACKPLANE_METRICS"
"""Environment variable with a random word that the processes of a server share. Process IDs are not unique on a folder
that several containers share."""
_numbers = itertools.count()
_held: dict[Path, int] = {}
"""Descriptors of the locks of this process's folders."""


def root() -> Path:
    """Returns the folder that contains those of all servers of this user."""
    return private_folder() / "metrics"


def create() -> str:
    """Creates a folder for the processes of a configuration, and returns its name. Removes stale folders."""
    parent = root()
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        with _locked(parent):
            _remove_stale(parent)
            word = os.environ.setdefault(TREE, secrets.token_hex(4))
            folder = parent / f"{os.getpid()}-{next(_numbers)}-{word}"
            folder.mkdir(mode=0o700)
            _held[folder] = _open(folder)
            fcntl.flock(_held[folder], fcntl.LOCK_EX)
    except OSError as fault:
        raise BackplaneError(
            f"{parent}, where workers write their metrics, cannot be used ({fault}); remove it, set TMPDIR to a "
            "folder of your own, or set BACKPLANE_METRICS=0"
        ) from fault
    atexit.register(_remove, folder, os.getpid())
    return folder.name


def existing(name: str) -> Path | None:
    """Returns the folder of this name, or None if it was created on another host, or removed."""
    folder = root() / name
    return folder if folder.is_dir() else None


def files(names: str) -> Iterator[Path]:
    """Yields the files of values in the folders that fit a pattern of names."""
    for folder in sorted(root().glob(names)):
        yield from sorted(folder.glob("[a-z]*-[0-9]*"))


def all_of_parent() -> str:
    """Returns a pattern for the names of all folders that the parent process has created."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a child of multiprocessing"
    return f"{parent.pid}-*-{os.environ.get(TREE, '*')}"


@guarded(
    "vllm.config.parallel:ParallelConfig._validate_parallel_config",
    why="the rank among several API servers is read",
)
def rank_of_api_server(parallel: Any) -> int | None:
    """Returns the rank of this process among several API servers, or None if it is the only one. -1 is the process that
    starts them and the engines."""
    return int(parallel._api_process_rank) if parallel._api_process_count > 1 else None


def first_rank(parallel: Any) -> int:
    """Returns the rank that the first worker of an engine has among the workers of all data-parallel replicas."""
    return int(parallel.data_parallel_index * parallel.world_size)


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob("[0-9]*-[0-9]*"):
        try:
            descriptor = _open(folder)
        except FileNotFoundError:  # its server is removing it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove_tree(folder)
        finally:
            os.close(descriptor)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked process inherits the exit function
        return
    try:
        with _locked(folder.parent):
            _remove_tree(folder)
    except OSError as fault:
        logger.warning("%s was not removed, which the next server does: %s", folder, fault)


def _remove_tree(folder: Path) -> None:
    # Its files and the folder itself may disappear meanwhile: a worker that ends removes its own.
    shutil.rmtree(folder, onerror=_unless_gone)


def _unless_gone(_function: object, _path: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
