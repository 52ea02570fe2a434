"""Where workers of one host tell each other which weights they hold, and wait for their turn to load.

A folder of the user's own for temporary files, with a note for each worker that lives: which of its open files are
shared memory (sealed.py), and what is where in them. Notes of processes that have ended are removed by whoever finds
them. The weights are never in this folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_backplane.errors import BackplaneError


@dataclass(frozen=True, slots=True)
class Offer:
    """A piece of shared memory that a living process holds."""

    process: int
    handle: int
    """The number of the open file in that process."""
    places: dict[str, tuple[int, int]]
    """By digest: where it begins, and how many bytes it has."""


class Board:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir()) / f"vllm-backplane-weights-{os.getuid()}"

    def offers(self) -> list[Offer]:
        """Of the processes that live. To be called `alone`; but a model that is given up takes its note at once."""
        found = []
        for note in sorted(self.folder.glob("[0-9]*.json")):
            try:
                process, begun, offers = self._read(note)
            except FileNotFoundError:
                continue
            if _lives(process, begun):
                found.extend(offers)
            else:
                note.unlink(missing_ok=True)
        return found

    def put(self, offers: list[Offer]) -> Path:
        """A note of this process. To be called `alone`."""
        process = psutil.Process()
        told = {
            "process": process.pid,
            "begun": process.create_time(),
            "offers": [{"handle": one.handle, "places": one.places} for one in offers],
        }
        note = self.folder / f"{process.pid}-{offers[0].handle}.json"
        fresh = note.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(told))
            fresh.replace(note)
        except OSError as fault:
            raise self._unusable(str(fault)) from fault
        return note

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else reads or puts offers."""
        with self._locked("lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextmanager
    def turn(self, number: int, waits: Callable[[], None]) -> Iterator[None]:
        """While no other process has a turn of this number; a process that ends gives it up. `waits` is called where
        another one has it."""
        with self._locked("turns") as handle:  # one byte of the file for each number, so that no file is left for each
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            except (BlockingIOError, PermissionError):  # lockf may say either
                waits()
                fcntl.lockf(handle, fcntl.LOCK_EX, 1, number)
            yield

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            found = self.folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise self._unusable("others than this user may write to it")
            handle = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as fault:
            raise self._unusable(str(fault)) from fault
        try:
            yield handle
        finally:
            os.close(handle)

    def _read(self, note: Path) -> tuple[int, float, list[Offer]]:
        try:
            told = json.loads(note.read_text())
            process = int(told["process"])
            offers = [
                Offer(process, int(one["handle"]), {key: (int(at), int(n)) for key, (at, n) in one["places"].items()})
                for one in told["offers"]
            ]
            return process, float(told["begun"]), offers
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
            raise self._unusable(f"{note.name}: {type(fault).__name__}: {fault}") from fault

    def _unusable(self, reason: str) -> BackplaneError:
        return BackplaneError(
            f"{self.folder} cannot be used ({reason}), where workers say which weights they share; remove it, or set "
            "TMPDIR to another folder"
        )


def _lives(process: int, begun: float) -> bool:
    """Its number may belong to another process by now."""
    try:
        # Both count from the system's start, of which the system's own account wavers by a second.
        return abs(psutil.Process(process).create_time() - begun) < 2
    except psutil.NoSuchProcess:
        return False
