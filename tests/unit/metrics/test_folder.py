"""Tests the folders of servers: who removes them, and who does not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_backplane.errors import BackplaneError
from vllm_backplane.metrics import folder


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder, "private_folder", lambda: tmp_path)
    monkeypatch.setenv(folder.TREE, "word")
    return tmp_path / "metrics"


def test_each_configuration_has_a_folder_of_its_own(private: Path) -> None:
    names = [folder.create(), folder.create()]
    assert len(set(names)) == 2
    for name in names:
        at = folder.existing(name)
        assert at is not None and at.parent == private
        assert at.stat().st_mode & 0o777 == 0o700
        (at / "worker-0").touch()
        (at / ".worker-1").touch()
    assert [path.name for path in folder.files(names[0])] == ["worker-0"]
    assert len(list(folder.files(f"{os.getpid()}-*"))) == 2


def test_the_folder_of_another_host_does_not_exist() -> None:
    assert folder.existing("12345-0") is None
    assert list(folder.files("12345-0")) == []


def test_the_folder_of_a_killed_server_is_removed_at_the_next_start(private: Path) -> None:
    own = folder.create()
    stale = private / "99999-0"
    stale.mkdir()
    (stale / "worker-0").touch()
    folder.create()
    assert not stale.exists()
    assert folder.existing(own) is not None, "its lock is held"


def test_other_folders_stay(private: Path) -> None:
    folder.create()
    (private / "notes").mkdir()
    folder.create()
    assert (private / "notes").exists()


def test_a_folder_that_cannot_be_created_is_an_error(private: Path) -> None:
    private.write_text("")
    with pytest.raises(BackplaneError, match="set BACKPLANE_METRICS=0"):
        folder.create()


def test_servers_with_the_same_process_id_have_folders_of_their_own(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests what containers with a common folder need: in each of them, a server may be the process 1."""
    monkeypatch.setattr(folder.os, "getpid", lambda: 1)
    monkeypatch.setattr(folder, "_numbers", itertools.count())
    first = folder.create()
    monkeypatch.setattr(folder, "_numbers", itertools.count())
    monkeypatch.delenv(folder.TREE)
    second = folder.create()
    assert first.startswith("1-0-") and second.startswith("1-0-") and first != second
    monkeypatch.setattr(folder.multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
    (private / first / "worker-0").touch()
    (private / second / "worker-1").touch()
    assert [path.name for path in folder.files(folder.all_of_parent())] == ["worker-1"]


@pytest.mark.process
def test_the_folder_is_removed_at_exit_by_its_own_process_alone(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from vllm_backplane.metrics import folder\n"
        "name = folder.create()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit()\n"  # runs the exit functions
        "os.waitpid(child, 0)\n"
        "print(folder.existing(name) is not None, folder.root() / name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    existed, at = done.stdout.split()
    assert existed == "True"
    assert not Path(at).exists() and Path(at).parent.is_dir()


@pytest.mark.process
def test_a_forked_process_holds_the_lock_of_a_server_that_was_killed(tmp_path: Path, private: Path) -> None:
    program = (
        "import os, pathlib, sys, time\n"
        "from vllm_backplane.metrics import folder\n"
        "folder.private_folder = lambda: pathlib.Path(sys.argv[1])\n"
        "name = folder.create()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "print(name, flush=True)\n"
        "os._exit(0)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None and running.stdin is not None
    name = running.stdout.readline().strip()
    running.wait(30)
    folder.create()
    assert folder.existing(name) is not None
    running.stdin.close()  # ends the forked process
    running.stdout.read()
    folder.create()
    assert folder.existing(name) is None
