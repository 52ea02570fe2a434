"""Keeps a ledger of the memory that processes of this host have reserved but not written yet.

A KV cache consists of zero pages, which become resident when they are first written. Until then the system counts them
as free, and a second server would use them as well; under load both would fill up, and the OOM killer would end one of
them. So each process writes an entry with its reservation to a shared folder, and every process treats the unwritten
part of all entries as used.
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

FOLDER = Path(tempfile.gettempdir()) / "vllm-backplane-memory-ledger"
"""The folder of the ledger. All users share it, because they share the memory."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Describes one process's entry in the ledger."""

    bytes: int
    """Bytes that the process has reserved and not written."""
    resident: int
    """The process's resident memory at the time of the entry. Growth since then counts as written."""
    begun: float
    """Start time of the process, which distinguishes it from a later process with the same number."""


def unwritten_bytes(folder: Path = FOLDER) -> int:
    """Returns the bytes that running processes, this one included, have reserved and not written yet."""
    return sum(_unwritten(pid, reservation) for pid, reservation in _entries(folder))


def reserve(count: int, free: int, folder: Path = FOLDER) -> None:
    """Adds `count` bytes to the reservation of this process; `free` is the system's free memory, without the ledger.

    Raises a BackplaneError if other processes have reserved too much of it, which happens if they start at the same
    time.
    """
    with _locked(folder):
        left = free - unwritten_bytes(folder)
        if count > left:
            raise BackplaneError(
                f"a KV cache of {count / 2**30:.2f} GiB no longer fits: {max(left, 0) / 2**30:.2f} GiB are left, "
                "because another server was started in the meantime; start this one again, or lower "
                "BACKPLANE_MEMORY_SHARE"
            )
        _write_entry(_own_bytes(folder) + count, folder)


def cancel(count: int, folder: Path = FOLDER) -> None:
    """Removes `count` bytes from the reservation of this process, when memory was released or will not be used."""
    with _locked(folder):
        _write_entry(_own_bytes(folder) - count, folder)


def _own_bytes(folder: Path) -> int:
    return sum(_unwritten(pid, reservation) for pid, reservation in _entries(folder) if pid == os.getpid())


def _write_entry(count: int, folder: Path) -> None:
    # The name includes the user: a process of another user may have had the same number and left an entry, which this
    # user may not replace.
    entry = folder / f"{os.getpid()}-{os.getuid()}"
    process = psutil.Process()
    values = {"bytes": count, "resident": process.memory_info().rss, "begun": process.create_time()}
    temporary = entry.with_name("." + entry.name)
    try:
        if count <= 0:
            entry.unlink(missing_ok=True)
            return
        temporary.write_text(json.dumps(values))
        temporary.replace(entry)
    except OSError as fault:
        raise _unusable(folder, fault) from fault


def _unwritten(pid: int, reservation: Reservation) -> int:
    try:
        resident = psutil.Process(pid).memory_info().rss
    except psutil.Error:  # the process ended in the meantime
        return 0
    return min(max(reservation.bytes - max(resident - reservation.resident, 0), 0), reservation.bytes)


def _entries(folder: Path) -> list[tuple[int, Reservation]]:
    """Returns (process, reservation) of every running process, and removes the entries of processes that ended."""
    found = []
    for entry in folder.glob("[0-9]*") if folder.is_dir() else ():
        reservation = _read(entry)
        if reservation is None:
            continue
        try:
            pid = int(entry.name.partition("-")[0])
            # Start times derive from the boot time, which Linux reports with an error of up to a second.
            is_running = abs(psutil.Process(pid).create_time() - reservation.begun) < 2
        except (psutil.Error, ValueError, OverflowError):  # the process ended, or the name is not a number
            is_running = False
        if is_running:
            found.append((pid, reservation))
        else:
            _remove(entry)
    return found


def _read(entry: Path) -> Reservation | None:
    try:
        values = json.loads(entry.read_text())
        reservation = Reservation(int(values["bytes"]), int(values["resident"]), float(values["begun"]))
    except (OSError, ValueError, KeyError, TypeError):  # being removed, or not an entry: every user may write here
        return None
    return reservation if reservation.bytes > 0 else None


def _remove(entry: Path) -> None:
    try:
        entry.unlink()
    except OSError:  # another user's entry; it belongs to no running process, so it is ignored anyway
        return


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates the folder if needed, and holds its lock."""
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
        f"{folder}, where servers record their memory reservations, cannot be used ({fault}); remove it, or set TMPDIR "
        "to a writable folder"
    )
