"""Tests processes that end with the process that started them, and the reasons of their failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import programs
from vllm_backplane.errors import BackplaneError, UsageError
from vllm_backplane.process.owned_process import OwnedProcess, command

pytestmark = pytest.mark.process

OWNED = """
import os, subprocess, sys, time
from vllm_backplane.process.owned_process import end_with_owner
end_with_owner(int(sys.argv[1]))
child = subprocess.Popen(["sleep", "600"])
print("vllm-backplane: started", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
OWNER = """
import os, sys, time
from vllm_backplane.process.owned_process import OwnedProcess, command
owned = OwnedProcess("test")
owned.start(command("owned_by_test", []), os.environ)
while True:
    owned.pass_on(lambda text: print(text, owned.folder, flush=True))
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "owned_by_test.py").write_text(OWNED)
    monkeypatch.setenv("PYTHONPATH", programs.on_path(tmp_path))


def ends(pid: int) -> bool:
    """Waits until a process has ended, and returns whether it has."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_it_ends_when_its_owner_is_killed():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        _started, pid, child, folder = owner.stdout.readline().split()
        try:
            owner.kill()
            assert ends(int(pid))
        finally:
            os.kill(int(child), signal.SIGKILL)
        assert Path(folder).is_dir()


def test_it_ends_with_all_of_its_session_and_leaves_no_file():
    found: list[str] = []
    with OwnedProcess("test") as owned:
        owned.start(command("owned_by_test", []), os.environ)
        (owned.folder / "sockets").mkdir()
        while not found:
            owned.pass_on(found.append)
            assert owned.status(0.02) is None
        _started, pid, child = found[0].split()
        assert owned.folder.stat().st_mode & 0o077 == 0
    assert ends(int(pid))
    assert ends(int(child))
    assert not owned.folder.exists()


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("print('x\\nvllm-backplane: error: no \\x1b such model'); sys.exit(2)", UsageError, "no ␛ such model"),
        ("print('vllm-backplane: error: no room'); sys.exit(1)", BackplaneError, "it failed: no room; its log is "),
        (
            "print('(Core) ERROR ValueError: the cause')\nsys.exit('RuntimeError: Engine core initialization failed')",
            BackplaneError,
            "it failed: ValueError: the cause; its log is ",
        ),
        ("sys.exit(7)", BackplaneError, "it failed: it ended with status 7; its log is "),
        ("os.kill(os.getpid(), 9)", BackplaneError, "it failed: signal 9 ended it; its log is "),
    ],
)
def test_a_failure_has_its_reason_and_its_log(tmp_path, program, kind, message):
    (tmp_path / "failing.py").write_text(f"import os, sys\n{program}\n")
    with OwnedProcess("test") as owned:
        owned.start(command("failing", []), os.environ)
        status = owned.status(60)
        assert status is not None
        fault = owned.failure(status, "it failed")
    assert type(fault) is kind
    assert message in str(fault)
    assert "\n" not in str(fault)
    assert owned.log.exists() is (kind is BackplaneError)
