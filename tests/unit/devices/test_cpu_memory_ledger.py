"""Tests the memory ledger: memory that another process reserved and has not written yet does not count as free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from vllm_backplane.devices.cpu import CpuDevice, memory_ledger
from vllm_backplane.errors import BackplaneError

MIB = 1 << 20

OTHER = """
import sys
from pathlib import Path
from vllm_backplane.devices.cpu import CpuDevice, memory_ledger
for function in (memory_ledger.unwritten_bytes, memory_ledger.reserve, memory_ledger.cancel):
    function.__defaults__ = (Path(sys.argv[1]),)
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
    """A process that has reserved 256 MiB."""

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
def other(folder: Path) -> Iterator[Other]:
    process = Other(folder)
    yield process
    process.end()


@pytest.mark.process
def test_what_another_process_reserved_is_not_free_until_it_is_written(folder: Path, other: Other) -> None:
    assert memory_ledger.unwritten_bytes(folder) == pytest.approx(256 * MIB, abs=8 * MIB)
    other.does("write")
    assert memory_ledger.unwritten_bytes(folder) < 8 * MIB, (
        "the system counts it as used now, so it must not count twice"
    )


@pytest.mark.process
def test_what_is_dropped_is_free_again(folder: Path, other: Other) -> None:
    other.does("drop")
    assert memory_ledger.unwritten_bytes(folder) == 0


@pytest.mark.process
def test_a_process_that_was_killed_has_no_reservation(folder: Path, other: Other) -> None:
    other.end()
    assert memory_ledger.unwritten_bytes(folder) == 0
    assert [entry.name for entry in folder.iterdir()] == ["lock"]


@pytest.mark.process
def test_what_is_reserved_cannot_be_reserved_again(folder: Path, other: Other) -> None:
    with pytest.raises(BackplaneError, match=r"0.25 GiB no longer fits: 0.0\d GiB are left.*start this one again"):
        memory_ledger.reserve(256 * MIB, 300 * MIB, folder)
    memory_ledger.reserve(16 * MIB, 300 * MIB, folder)
    assert memory_ledger.unwritten_bytes(folder) == pytest.approx(272 * MIB, abs=8 * MIB)
    memory_ledger.cancel(16 * MIB, folder)
    assert memory_ledger.unwritten_bytes(folder) == pytest.approx(256 * MIB, abs=8 * MIB)


def test_the_device_deducts_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ledger.unwritten_bytes, "__defaults__", (folder,))
    before = CpuDevice().memory()
    memory_ledger.reserve(4096 * MIB, 1 << 40, folder)
    after = CpuDevice().memory()
    assert before.free - after.free > 3072 * MIB, "other changes of the machine's free memory are smaller"
    assert after.total == before.total


@pytest.mark.parametrize("text", ["", "{", "[]", '{"bytes": -5, "resident": 0, "begun": 0}', '{"bytes": "x"}'])
def test_invalid_entries_count_for_nothing(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / f"{os.getpid()}-{os.getuid()}").write_text(text)
    assert memory_ledger.unwritten_bytes(folder) == 0


def test_a_process_that_got_the_number_of_another_has_no_reservation(folder: Path) -> None:
    folder.mkdir()
    begun = psutil.Process().create_time() - 100
    (folder / f"{os.getpid()}-{os.getuid()}").write_text(json.dumps({"bytes": MIB, "resident": 0, "begun": begun}))
    assert memory_ledger.unwritten_bytes(folder) == 0


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackplaneError, match="set TMPDIR"):
        memory_ledger.reserve(1, 1 << 40, tmp_path / "file")


@pytest.mark.parametrize("name", ["7x", "7-7-7", "99999999999999999999-0"])
def test_a_name_that_is_no_number_counts_for_nothing(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / name).write_text(json.dumps({"bytes": MIB, "resident": 0, "begun": 0}))
    assert memory_ledger.unwritten_bytes(folder) == 0


def test_an_entry_that_cannot_be_written_is_an_error_with_a_remedy(folder: Path) -> None:
    (folder / f"{os.getpid()}-{os.getuid()}").mkdir(parents=True)
    with pytest.raises(BackplaneError, match=f"{folder}, where .* cannot be used.*remove it, or set TMPDIR"):
        memory_ledger.reserve(MIB, 1 << 40, folder)


ANOTHER_USER = """
import os, sys
from pathlib import Path
from vllm_backplane.devices.cpu import memory_ledger

folder = Path(sys.argv[1])
memory_ledger.reserve(1 << 20, 1 << 40, folder)  # as root: the folder's sticky bit keeps other users from removing it
[own] = [entry for entry in folder.iterdir() if entry.name != "lock"]
for left in (folder / str(os.getpid()), own):
    left.write_text('{"bytes": 1048576, "resident": 0, "begun": 1}')  # of an earlier process with this number
os.setuid(65534)
memory_ledger.reserve(2 << 20, 1 << 40, folder)
print(memory_ledger.unwritten_bytes(folder))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.process
def test_a_stale_entry_of_another_user_is_ignored() -> None:
    with tempfile.TemporaryDirectory() as above:  # other users cannot read pytest's own folders
        os.chmod(above, 0o755)
        run = subprocess.run(
            [sys.executable, "-c", ANOTHER_USER, f"{above}/ledger"], capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) == pytest.approx(2 * MIB, abs=MIB)
