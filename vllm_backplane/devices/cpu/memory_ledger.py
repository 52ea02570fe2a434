"""Memory that processes of this host have been promised and have not written to yet.

A KV cache is zero pages, which become memory when they are first written. Until then the system counts them as free,
and a second server would be granted them again; under load both would fill up, and the OOM killer would end one. So a
process leaves a note of what it was promised, and everybody counts the notes' unwritten part as taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_backplane.errors import BackplaneError

FOLDER = Path(tempfile.gettempdir()) / "vllm-backplane-promised"
"""Shared by all users: memory is."""


@dataclass(frozen=True, slots=True)
class Promise:
    bytes: int
    resident: int
    """Of the process, when it was made: what it has grown by since is taken as written."""
    begun: float
    """When the process began: its number may belong to another by now."""


def unwritten(folder: Path = FOLDER) -> int:
    """Bytes that living processes, this one included, may still write to."""
    return sum(_left(pid, promise) for pid, promise in _living(folder))


def promise(count: int, free: int, folder: Path = FOLDER) -> None:
    """Note that this process will write to `count` bytes; `free` is what the system has, promises not deducted.

    An error if others have been promised too much of it by now: they may have started at the same time.
    """
    with _only_one(folder):
        left = free - unwritten(folder)
        if count > left:
            raise BackplaneError(
                f"the memory for a KV cache of {count / 2**30:.2f} GiB was free and {max(left, 0) / 2**30:.2f} GiB are "
                "left of it: another server was started meanwhile; start this one again, or lower "
                "BACKPLANE_MEMORY_SHARE"
            )
        _note(_own(folder) + count, folder)


def withdraw(count: int, folder: Path = FOLDER) -> None:
    """The memory of a promise was given back, or will not be used."""
    with _only_one(folder):
        _note(_own(folder) - count, folder)


def _own(folder: Path) -> int:
    return sum(_left(pid, promise) for pid, promise in _living(folder) if pid == os.getpid())


def _note(count: int, folder: Path) -> None:
    # Another user's process may have had this number and left a note, which only that user may replace.
    note = folder / f"{os.getpid()}-{os.getuid()}"
    process = psutil.Process()
    made = {"bytes": count, "resident": process.memory_info().rss, "begun": process.create_time()}
    fresh = note.with_name("." + note.name)
    try:
        if count <= 0:
            note.unlink(missing_ok=True)
            return
        fresh.write_text(json.dumps(made))
        fresh.replace(note)
    except OSError as fault:
        raise _unusable(folder, fault) from fault


def _left(pid: int, promise: Promise) -> int:
    try:
        resident = psutil.Process(pid).memory_info().rss
    except psutil.Error:  # it ended while we looked
        return 0
    return min(max(promise.bytes - max(resident - promise.resident, 0), 0), promise.bytes)


def _living(folder: Path) -> list[tuple[int, Promise]]:
    found = []
    for note in folder.glob("[0-9]*") if folder.is_dir() else ():
        made = _read(note)
        if made is None:
            continue
        try:
            pid = int(note.name.partition("-")[0])
            # Both count from the system's start, of which the system's own account wavers by a second.
            same = abs(psutil.Process(pid).create_time() - made.begun) < 2
        except (psutil.Error, ValueError, OverflowError):  # ended, or a name that is no number
            same = False
        if same:
            found.append((pid, made))
        else:
            _forget(note)
    return found


def _read(note: Path) -> Promise | None:
    try:
        told = json.loads(note.read_text())
        made = Promise(int(told["bytes"]), int(told["resident"]), float(told["begun"]))
    except (OSError, ValueError, KeyError, TypeError):  # being removed, or not of ours: the folder is open to all
        return None
    return made if made.bytes > 0 else None


def _forget(note: Path) -> None:
    try:
        note.unlink()
    except OSError:  # another user's; it says nothing about a living process, so it counts for nothing
        return


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    old = os.umask(0)
    try:
        folder.mkdir(mode=0o1777, exist_ok=True)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as fault:
        raise _unusable(folder, fault) from fault
    finally:
        os.umask(old)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _unusable(folder: Path, fault: OSError) -> BackplaneError:
    return BackplaneError(
        f"{folder} cannot be used ({fault}), where servers note how much memory they were promised; remove it, or "
        "set TMPDIR to a folder that can be written to"
    )
