"""Keeps the logs of servers whose start is shown on a terminal, in a folder that only this user can read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from pathlib import Path

from vllm_backplane.errors import BackplaneError
from vllm_backplane.models.cache import derived_folder

FOLDER = "logs"
KEPT = 10
"""Logs that are kept, that of the new server included. The log of a running server is kept in any case."""
LONGEST_LOG = 16 << 20
"""Bytes of a log. A longer one is moved to a second file, which has the previous part of the log."""
REMEDY = "set BACKPLANE_CACHE or TMPDIR to a folder of your own"


def log_folder() -> Path:
    """Returns the folder for logs, and creates it if needed. Raises if other users can open it."""
    folder = derived_folder() / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as fault:
        raise BackplaneError(f"cannot create {folder}: {fault.strerror}; {REMEDY}") from fault
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BackplaneError(f"{folder} is not a folder that only you can open; remove it, or {REMEDY}")
    return folder


def open_log() -> tuple[Path, int]:
    """Creates a log, removes old ones, and returns its path and its descriptor. Every write is at the end of the file,
    so that several processes can share it."""
    folder = log_folder()
    _remove_old(folder)
    # Containers that share the folder have equal process IDs.
    path = folder / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}.log"
    try:
        _require_room(folder)
        # NFS locks only files that are open for writing, and exclusively only those that are open for reading too.
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        raise BackplaneError(f"cannot create {path}: {fault.strerror}; {REMEDY}") from fault
    with contextlib.suppress(OSError):  # on a file system without locks, no log is removed
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # the processes of the server inherit it; it ends with the last one
    return path, descriptor


def _require_room(folder: Path) -> None:
    """Raises if a long log would fill the disk. A server whose output cannot be written can fail at any line."""
    found = os.statvfs(folder)
    free, needed = found.f_bavail * found.f_frsize, 2 * LONGEST_LOG
    if found.f_blocks and free < needed:  # some file systems do not know their size
        raise BackplaneError(f"{folder} has {free >> 20} MiB of free space, and logs need {needed >> 20}; {REMEDY}")


def pipe_of(log: Path) -> Path:
    """Returns the path of the named pipe that belongs to a log."""
    return log.with_suffix(".pipe")


def previous_part(log: Path) -> Path:
    """Returns the path of the previous part of a long log."""
    return log.with_suffix(".previous.log")


def _remove_old(folder: Path) -> None:
    logs = [path for path in folder.glob("serve-*.log") if not path.name.endswith(".previous.log")]
    for path in sorted(logs, key=lambda one: one.name, reverse=True)[KEPT - 1 :]:  # another one will be added
        # Another server that starts may remove the same files.
        with contextlib.suppress(OSError):
            if not _is_in_use(path):
                for one in (pipe_of(path), previous_part(path), path):
                    one.unlink(missing_ok=True)


def _is_in_use(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:  # it is locked, or the file system has no locks
        return True
    finally:
        os.close(descriptor)


class LogTail:
    """Reads a log as it grows, and begins it again when it is too long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._position = 0

    def read(self) -> str:
        """Returns what was added since the last call."""
        parts = []
        if os.fstat(self._descriptor).st_size < self._position:  # the user has emptied it
            self._position = 0
        while part := os.pread(self._descriptor, 1 << 20, self._position):
            self._position += len(part)
            parts.append(part)
        if self._position > LONGEST_LOG:
            with contextlib.suppress(OSError):  # without space for the copy, the log must be bounded all the more
                self._copy(previous_part(self._path))
            # Lines that are written between the two calls are lost. A rename would not do: the server keeps its file.
            os.ftruncate(self._descriptor, 0)
            self._position = 0
        return b"".join(parts).decode(errors="replace")

    def _copy(self, place: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(place, flags, 0o600), "wb") as copy:
            for start in range(0, self._position, 1 << 20):
                copy.write(os.pread(self._descriptor, 1 << 20, start))
