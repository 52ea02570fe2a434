"""Keeps a ledger of the host memory that processes of this user have reserved but not written yet.

A KV cache consists of zero pages, which become resident when they are first written. Until then the system counts them
as free, and a second server would use them as well; under load both would fill up, and the OOM killer would end one of
them. So each process writes an entry with its reservation to a folder, and every process treats the unwritten part of
all entries as used.

The folder belongs to one user and is closed to all others, so its content can be trusted. Of other users' processes
only the memory that they have written counts, as the system reports it.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_backplane.device.contract import MemoryInfo
from vllm_backplane.errors import BackplaneError
from vllm_backplane.host.host_memory import usable_memory
from vllm_backplane.private_folder import private_folder


@dataclass(frozen=True, slots=True)
class Reservation:
    """Describes one process's entry in the ledger."""

    bytes: int
    """Bytes that the process has reserved and not written."""
    resident: int
    """The process's resident memory at the time of the entry. Growth since then counts as written."""
    begun: float
    """Start time of the process, which distinguishes it from a later process with the same number."""


class MemoryLedger:
    """Reads and changes the ledger in a folder, which is that of this user unless another one is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self._given = folder
        self._threads = threading.RLock()
        self._cancelled: deque[int] = deque()
        self._is_locked = False

    def unwritten_bytes(self, *, of_others: bool = False) -> int:
        """Returns the bytes that running processes have reserved and not written yet.

        This process is one of them, unless only those `of_others` are wanted.
        """
        return sum(_unwritten(pid, one) for pid, one in self._entries() if not of_others or pid != os.getpid())

    def reserve(self, count: int, *, purpose: str, remedy: str, free: Callable[[], int] | None = None) -> None:
        """Adds `count` bytes to the reservation of this process, or raises if they are more than what is left.

        `free` measures the system's free memory, without the ledger. If it is not given, a limit of the process itself
        counts too; memory that is mapped already is within that limit. `purpose` and `remedy` are the
        beginning and the end of the error message.
        """
        with self._locked():
            now = usable_memory() if free is None else MemoryInfo(total=0, free=free())
            left = now.free - self.unwritten_bytes()
            if count > left:
                others = self.unwritten_bytes(of_others=True)
                because = f", because other processes have reserved {_gib(others)}" if others else ""
            if now.left_to_process is not None and now.left_to_process < left:
                left, because = now.left_to_process, f" within {now.limit}"
            if count > left:
                raise BackplaneError(
                    f"{purpose} of {_gib(count)} does not fit: {_gib(max(left, 0))} are left{because}; {remedy}"
                )
            self._change(count)

    def cancel(self, count: int) -> None:
        """Removes `count` bytes from the reservation of this process, when memory was released or will not be used.

        Finalizers call this, at any point of a thread: also inside of `reserve`, which then applies it at its end.
        """
        self._cancelled.append(count)
        with self._threads:
            if not self._is_locked:
                with self._locked():
                    pass

    def _change(self, count: int) -> None:
        own = sum(_unwritten(pid, one) for pid, one in self._entries() if pid == os.getpid())
        self._write_entry(own + count)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the ledger's lock, and applies at the end what was cancelled meanwhile."""
        try:
            with self._held():
                yield
        finally:
            while self._cancelled:  # since the lock was released
                with self._held():
                    pass

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._threads:
            file = self._folder() / "lock"
            try:
                handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as fault:
                raise _unusable(file, fault) from fault
            self._is_locked = True
            try:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX)
                    try:
                        yield
                    finally:
                        while self._cancelled:
                            self._change(-self._cancelled.popleft())
                finally:
                    os.close(handle)
            finally:
                # A finalizer may run between any two steps. Until here, it must not take the lock.
                self._is_locked = False

    def _folder(self) -> Path:
        folder = self._given or private_folder() / "memory-ledger"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as fault:
            raise _unusable(folder, fault) from fault
        return folder

    def _write_entry(self, count: int) -> None:
        entry = self._folder() / str(os.getpid())
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
            raise _unusable(entry, fault) from fault

    def _entries(self) -> list[tuple[int, Reservation]]:
        """Returns (process, reservation) of every running process, and removes the entries of processes that ended."""
        found = []
        for entry in self._folder().glob("[0-9]*"):
            try:
                pid = int(entry.name)
                values = json.loads(entry.read_text())
                reservation = Reservation(int(values["bytes"]), int(values["resident"]), float(values["begun"]))
            except FileNotFoundError:  # its process has removed it
                continue
            except (OSError, ValueError, KeyError, TypeError) as fault:
                raise _unusable(entry, fault) from fault
            try:
                # Start times derive from the boot time, which Linux reports with an error of up to a second.
                is_running = abs(psutil.Process(pid).create_time() - reservation.begun) < 2
            except psutil.Error:  # the process ended
                is_running = False
            if is_running:
                found.append((pid, reservation))
            else:
                entry.unlink(missing_ok=True)
        return found


def _unwritten(pid: int, reservation: Reservation) -> int:
    try:
        resident = psutil.Process(pid).memory_info().rss
    except psutil.Error:  # the process ended in the meantime
        return 0
    return min(max(reservation.bytes - max(resident - reservation.resident, 0), 0), reservation.bytes)


def _unusable(file: Path, fault: Exception) -> BackplaneError:
    return BackplaneError(
        f"{file}, where servers record their memory reservations, cannot be used ({type(fault).__name__}: {fault}); "
        "remove it, or set TMPDIR to a folder of your own"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


ledger = MemoryLedger()
"""The ledger of this user."""
