"""Tests that logs are private, few and bounded, and that no kind of file system makes a start fail."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_backplane.errors import BackplaneError
from vllm_backplane.start_display import log_folder
from vllm_backplane.start_display.log_folder import KEPT, LogTail, open_log, pipe_of, previous_part


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def old(cache: Path) -> list[Path]:
    """Creates logs of servers that have ended, as many as are kept."""
    folder = log_folder.log_folder()
    logs = [folder / f"serve-2020010{number}-000000-7.log" for number in range(KEPT)]
    for log in logs:
        for path in (log, pipe_of(log), previous_part(log)):
            path.touch()
    return logs


@pytest.fixture
def opened() -> Iterator[tuple[Path, int]]:
    path, descriptor = open_log()
    yield path, descriptor
    os.close(descriptor)


def close_log() -> Path:
    path, descriptor = open_log()
    os.close(descriptor)
    return path


def locks_of_nfs(descriptor: int, operation: int) -> None:
    """Locks only what is open in the mode that the kind of lock needs there."""
    wanted = os.O_RDONLY if operation & fcntl.LOCK_SH else os.O_WRONLY
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE not in (wanted, os.O_RDWR):
        raise OSError(errno.EBADF, "the file is open in another mode")


def no_locks(_descriptor: int, _operation: int) -> None:
    raise OSError(errno.ENOLCK, "no locks")


def test_a_log_is_private_and_has_a_name_of_its_own(opened: tuple[Path, int]) -> None:
    path, descriptor = opened
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    assert close_log() != path, "another container may have the same process ID"


def test_the_oldest_logs_are_removed(old: list[Path]) -> None:
    new = close_log()
    assert sorted(new.parent.glob("serve-*.log")) == sorted([*old[1:], *map(previous_part, old[1:]), new])
    assert not pipe_of(old[0]).exists()


def test_the_log_of_a_running_server_stays(old: list[Path]) -> None:
    with old[0].open() as log:
        fcntl.flock(log, fcntl.LOCK_SH)
        close_log()
    assert old[0].exists()


def test_logs_are_locked_on_nfs(monkeypatch: pytest.MonkeyPatch, old: list[Path]) -> None:
    monkeypatch.setattr(fcntl, "flock", locks_of_nfs)
    assert close_log().exists()
    assert not old[0].exists()


def test_without_locks_no_log_is_removed(monkeypatch: pytest.MonkeyPatch, old: list[Path]) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert close_log().exists()
    assert old[0].exists()


def test_what_cannot_be_removed_does_not_matter(monkeypatch: pytest.MonkeyPatch, old: list[Path]) -> None:
    old[0].unlink()
    old[0].mkdir()
    assert close_log().exists()


def test_a_log_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096, f_blocks=100))
    with pytest.raises(BackplaneError, match=r"0 MiB of free space, and logs need 32; set BACKPLANE_CACHE"):
        open_log()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0))
    assert close_log().exists(), "the file system does not know its size"


def test_a_log_that_cannot_be_created_is_named(cache: Path) -> None:
    (cache / "logs").touch()
    with pytest.raises(BackplaneError, match=rf"cannot create {cache}/logs: .*; set BACKPLANE_CACHE"):
        open_log()


def test_a_tail_returns_what_was_added(opened: tuple[Path, int]) -> None:
    path, descriptor = opened
    tail = LogTail(path)
    assert tail.read() == ""
    os.write(descriptor, b"one\n")
    assert tail.read() == "one\n"
    os.write(descriptor, b"two\n")
    assert tail.read() == "two\n"


@pytest.mark.parametrize("case", ["as usual", "no copy can be made", "the log was removed"])
def test_a_long_log_begins_again(monkeypatch: pytest.MonkeyPatch, opened: tuple[Path, int], case: str) -> None:
    monkeypatch.setattr(log_folder, "LONGEST_LOG", 10)
    path, descriptor = opened
    tail = LogTail(path)
    if case == "no copy can be made":
        previous_part(path).mkdir()
    if case == "the log was removed":
        path.unlink()
    os.write(descriptor, b"0123456789\n")
    assert tail.read() == "0123456789\n"
    assert os.fstat(descriptor).st_size == 0
    os.write(descriptor, b"next\n")
    assert tail.read() == "next\n"
    if case != "no copy can be made":
        assert previous_part(path).read_text() == "0123456789\n"
        assert stat.S_IMODE(previous_part(path).stat().st_mode) == 0o600


def test_a_log_that_the_user_has_emptied_is_followed(opened: tuple[Path, int]) -> None:
    path, descriptor = opened
    tail = LogTail(path)
    os.write(descriptor, b"a line of the log\n")
    tail.read()
    os.truncate(path, 0)
    os.write(descriptor, b"next\n")
    assert tail.read() == "next\n"
