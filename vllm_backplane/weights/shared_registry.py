"""Keeps a per-user registry of the weights that workers of this host have in shared memory, and serializes loading.

The registry is a folder for temporary files that only its user can write. It has a JSON file for each registered model:
which file descriptors of the worker process are shared segments (`sealed_memory.py`), and which tensors lie where in
them. Readers remove the files of processes that have ended. The weights themselves are never in this folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_backplane.errors import BackplaneError
from vllm_backplane.private_folder import private_folder


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Describes a shared memory segment that a live process holds."""

    pid: int
    descriptor: int
    """File descriptor of the segment in that process."""
    tensors: dict[str, tuple[int, int]]
    """Offset and number of bytes of each tensor in the segment, by digest."""


class WeightsRegistry:
    """Keeps this user's registry of shared weights on this host. The JSON keys are a protocol: do not change them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or private_folder() / "weights"

    def entries(self) -> list[SegmentEntry]:
        """Returns the segments of all live processes. To be called under `locked`. A file may still disappear during
        the call, because a model that is deleted removes its file without the lock."""
        found = []
        for file in sorted(self.folder.glob("[0-9]*.json")):
            try:
                pid, started, entries = self._read(file)
            except FileNotFoundError:
                continue
            if _is_alive(pid, started):
                found.extend(entries)
            else:
                file.unlink(missing_ok=True)
        return found

    def add(self, entries: list[SegmentEntry]) -> Path:
        """Registers segments of this process, and returns the file that does so. To be called under `locked`."""
        process = psutil.Process()
        content = {
            "process": process.pid,
            "begun": process.create_time(),
            "offers": [{"handle": entry.descriptor, "places": entry.tensors} for entry in entries],
        }
        file = self.folder / f"{process.pid}-{entries[0].descriptor}.json"
        unfinished = file.with_suffix(".new")
        try:
            unfinished.write_text(json.dumps(content))
            unfinished.replace(file)
        except OSError as fault:
            raise self._unusable(str(fault)) from fault
        return file

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the registry's exclusive lock inside the block."""
        with self._opened("lock") as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    @contextmanager
    def loading_lock(self, number: int, on_wait: Callable[[], None]) -> Iterator[None]:
        """Holds the lock with this number inside the block; the system releases it if the process ends. Calls `on_wait`
        if another process holds it."""
        with self._opened("turns") as descriptor:  # one byte of one file per number, so that no file per number is left
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            except (BlockingIOError, PermissionError):  # lockf raises either, depending on the system
                on_wait()
                fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, number)
            yield

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Opens a lock file. Creates the folder, and raises if another user may write to it."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            found = self.folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise self._unusable("other users may write to it")
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as fault:
            raise self._unusable(str(fault)) from fault
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _read(self, file: Path) -> tuple[int, float, list[SegmentEntry]]:
        """Returns the process ID, the process's start time and its segments. Raises FileNotFoundError if the file has
        been removed."""
        try:
            content = json.loads(file.read_text())
            pid = int(content["process"])
            entries = [
                SegmentEntry(
                    pid,
                    int(one["handle"]),
                    {digest: (int(offset), int(count)) for digest, (offset, count) in one["places"].items()},
                )
                for one in content["offers"]
            ]
            return pid, float(content["begun"]), entries
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
            raise self._unusable(f"{file.name}: {type(fault).__name__}: {fault}") from fault

    def _unusable(self, reason: str) -> BackplaneError:
        return BackplaneError(
            f"{self.folder}, the registry of weights that workers share, cannot be used ({reason}); remove it, or set "
            "TMPDIR to another folder"
        )


def _is_alive(pid: int, started: float) -> bool:
    """Returns whether the process that registered still runs. Another process may have reused its ID."""
    try:
        # Start times are computed from the system's boot time, which Linux reports with an error of up to a second.
        return abs(psutil.Process(pid).create_time() - started) < 2
    except psutil.NoSuchProcess:
        return False
