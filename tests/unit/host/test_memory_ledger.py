"""Tests the memory ledger: memory that another process reserved and has not written yet does not count as free."""

from __future__ import annotations

import gc
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.devices.cpu import device as cpu_device
from vllm_backplane.errors import BackplaneError
from vllm_backplane.host import memory_ledger
from vllm_backplane.host.memory_ledger import MemoryLedger
from vllm_backplane.private_folder import private_folder

MIB = 1 << 20
MESSAGE: dict[str, Any] = {"purpose": "a KV cache", "remedy": "start again"}

OTHER = """
import sys
from pathlib import Path
from vllm_backplane.host.memory_ledger import MemoryLedger
from vllm_backplane.devices.cpu import CpuDevice, device
device.ledger = MemoryLedger(Path(sys.argv[1]))
cache = CpuDevice().zeroed_bytes(256 << 20)
print("reserved", flush=True)
for line in sys.stdin:
    if line == "write\\n":
        cache.fill_(1)
    elif line == "drop\\n":
        del cache
    print("done", flush=True)
"""


class Other:
    """Runs a process that has reserved 256 MiB."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", OTHER, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin and self.process.stdout
        self._to, self._from = self.process.stdin, self.process.stdout
        assert self._from.readline() == "reserved\n"

    def does(self, what: str) -> None:
        self._to.write(what + "\n")
        self._to.flush()
        assert self._from.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._to.close()
        self._from.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def ledger(folder: Path) -> MemoryLedger:
    return MemoryLedger(folder)


@pytest.fixture
def other(folder: Path) -> Iterator[Other]:
    process = Other(folder)
    yield process
    process.end()


@pytest.mark.process
def test_what_another_process_reserved_is_not_free_until_it_is_written(ledger: MemoryLedger, other: Other) -> None:
    assert ledger.unwritten_bytes() == pytest.approx(256 * MIB, abs=8 * MIB)
    assert ledger.unwritten_bytes(of_others=True) == ledger.unwritten_bytes()
    other.does("write")
    assert ledger.unwritten_bytes() < 8 * MIB, "the system counts it as used now, so it must not count twice"


@pytest.mark.process
def test_what_is_dropped_is_free_again(ledger: MemoryLedger, other: Other) -> None:
    other.does("drop")
    assert ledger.unwritten_bytes() == 0


@pytest.mark.process
def test_a_process_that_was_killed_has_no_reservation(ledger: MemoryLedger, folder: Path, other: Other) -> None:
    other.end()
    assert ledger.unwritten_bytes() == 0
    assert [entry.name for entry in folder.iterdir()] == ["lock"]


@pytest.mark.process
def test_what_is_reserved_cannot_be_reserved_again(ledger: MemoryLedger, other: Other) -> None:
    refused = (
        r"a KV cache of 0.25 GiB does not fit: 0.0\d GiB are left, because other processes have reserved 0.2\d GiB"
    )
    with pytest.raises(BackplaneError, match=refused + "; start again"):
        ledger.reserve(256 * MIB, free=lambda: 300 * MIB, **MESSAGE)
    ledger.reserve(16 * MIB, free=lambda: 300 * MIB, **MESSAGE)
    assert ledger.unwritten_bytes() == pytest.approx(272 * MIB, abs=8 * MIB)
    assert ledger.unwritten_bytes(of_others=True) == pytest.approx(256 * MIB, abs=8 * MIB)
    ledger.cancel(16 * MIB)
    assert ledger.unwritten_bytes() == pytest.approx(256 * MIB, abs=8 * MIB)


def test_without_other_processes_none_is_blamed(ledger: MemoryLedger) -> None:
    with pytest.raises(BackplaneError, match=r"a KV cache of 0.25 GiB does not fit: 0.10 GiB are left; start again"):
        ledger.reserve(256 * MIB, free=lambda: 100 * MIB, **MESSAGE)


def test_the_device_deducts_it(ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "ledger", ledger)
    before = CpuDevice().memory()
    ledger.reserve(4096 * MIB, free=lambda: 1 << 40, **MESSAGE)
    after = CpuDevice().memory()
    assert before.free - after.free > 3072 * MIB, "other changes of the machine's free memory are smaller"
    assert after.total == before.total
    assert after.reserved_by_others == 0


@pytest.mark.process
def test_the_device_states_what_others_have_reserved(
    ledger: MemoryLedger, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_device, "ledger", ledger)
    assert CpuDevice().memory().reserved_by_others == pytest.approx(256 * MIB, abs=8 * MIB)


def test_a_finalizer_that_runs_while_the_ledger_is_locked(
    ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests garbage collection inside of `reserve`: it must neither wait for the lock of its own thread nor be lost."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    ledger.reserve(64 * MIB, free=lambda: 1 << 40, **MESSAGE)
    forgotten: Any = Cycle()
    weakref.finalize(forgotten, ledger.cancel, 64 * MIB)
    del forgotten
    measured = memory_ledger.usable_memory

    def collect_first() -> Any:
        gc.collect()
        return measured()

    monkeypatch.setattr(memory_ledger, "usable_memory", collect_first)
    done = threading.Thread(target=ledger.reserve, args=(16 * MIB,), kwargs=MESSAGE, daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive(), "the finalizer waits for a lock that its thread holds"
    assert ledger.unwritten_bytes() == pytest.approx(16 * MIB, abs=8 * MIB)


def test_a_finalizer_that_runs_while_the_lock_is_released(
    ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.reserve(64 * MIB, free=lambda: 1 << 40, **MESSAGE)
    close, left = os.close, [32 * MIB, 32 * MIB]

    def close_and_collect(handle: int) -> None:
        if left:
            ledger.cancel(left.pop())
        close(handle)
        if left:
            ledger.cancel(left.pop())

    monkeypatch.setattr(memory_ledger.os, "close", close_and_collect)
    done = threading.Thread(target=ledger.reserve, args=(16 * MIB,), kwargs=MESSAGE, daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive(), "the finalizer waits for a lock that its thread holds"
    assert ledger.unwritten_bytes() == pytest.approx(16 * MIB, abs=8 * MIB)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"bytes": "x"}'])
def test_an_entry_that_cannot_be_read_is_an_error_with_a_remedy(ledger: MemoryLedger, folder: Path, text: str) -> None:
    """Tests damage: the folder belongs to the user alone, so no one else can have written the entry."""
    folder.mkdir()
    (folder / str(os.getpid())).write_text(text)
    with pytest.raises(
        BackplaneError, match=f"{folder}/{os.getpid()}, where .* cannot be used.*remove it, or set TMPDIR"
    ):
        ledger.unwritten_bytes()


def test_a_process_that_got_the_number_of_another_has_no_reservation(ledger: MemoryLedger, folder: Path) -> None:
    folder.mkdir()
    begun = psutil.Process().create_time() - 100
    (folder / str(os.getpid())).write_text(json.dumps({"bytes": MIB, "resident": 0, "begun": begun}))
    assert ledger.unwritten_bytes() == 0
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackplaneError, match="set TMPDIR"):
        MemoryLedger(tmp_path / "file").reserve(1, free=lambda: 1 << 40, **MESSAGE)


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder for temporary files, in which the user's folder is expected."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"vllm-backplane-{os.getuid()}"


def test_the_folder_is_closed_to_others(temporary: Path) -> None:
    MemoryLedger().reserve(MIB, **MESSAGE)
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    assert sorted(path.name for path in temporary.rglob("*")) == sorted(["memory-ledger", "lock", str(os.getpid())])
    assert stat.S_IMODE((temporary / "memory-ledger" / "lock").stat().st_mode) == 0o600


def _is_open(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _is_a_link(folder: Path) -> None:
    (folder.parent / "target").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "target")


def _is_a_file(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("prepare", [_is_open, _is_a_link, _is_a_file])
def test_a_folder_that_another_user_can_influence_is_refused(temporary: Path, prepare: Any) -> None:
    prepare(temporary)
    before = {path: path.lstat() for path in temporary.parent.rglob("*")}
    for use in (private_folder, MemoryLedger().unwritten_bytes, lambda: MemoryLedger().cancel(1)):
        with pytest.raises(BackplaneError, match=f"{temporary}.*set TMPDIR to a folder of your own"):
            use()
    assert {path: path.lstat() for path in temporary.parent.rglob("*")} == before, "nothing is written"


def test_a_link_in_place_of_the_lock_is_not_followed(temporary: Path) -> None:
    (temporary / "memory-ledger").mkdir(parents=True, mode=0o700)
    temporary.chmod(0o700)
    (temporary / "memory-ledger" / "lock").symlink_to(temporary.parent / "victim")
    with pytest.raises(BackplaneError, match="cannot be used"):
        MemoryLedger().reserve(MIB, **MESSAGE)
    assert not (temporary.parent / "victim").exists()


ANOTHER_USER = """
import os, sys, tempfile
from vllm_backplane.private_folder import private_folder

tempfile.tempdir = sys.argv[1]
os.mkdir(f"{sys.argv[1]}/vllm-backplane-65534", 0o700)  # as root, before the user
os.setuid(65534)
try:
    private_folder()
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.process
def test_a_folder_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as above:  # other users cannot read pytest's own folders
        os.chmod(above, 0o1777)
        run = subprocess.run([sys.executable, "-c", ANOTHER_USER, above], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        assert "is not a folder that only you can read and write; remove it, or set TMPDIR" in run.stdout
