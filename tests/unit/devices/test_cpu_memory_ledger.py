"""Memory that was promised to another process and not written yet is not free."""

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

from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.devices.cpu import memory_ledger as promised
from vllm_backplane.errors import BackplaneError

MIB = 1 << 20

OTHER = """
import sys
from pathlib import Path
from vllm_backplane.devices.cpu import CpuDevice, memory_ledger as promised
promised.unwritten.__defaults__ = promised.promise.__defaults__ = promised.withdraw.__defaults__ = (Path(sys.argv[1]),)
cache = CpuDevice().zeroed_bytes(256 << 20)
print("promised", flush=True)
for line in sys.stdin:
    if line == "write\\n":
        cache.fill_(1)
    elif line == "drop\\n":
        del cache
    print("done", flush=True)
"""


class Other:
    """A process that was promised 256 MiB."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", OTHER, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin and self.process.stdout
        self._to, self._from = self.process.stdin, self.process.stdout
        assert self._from.readline() == "promised\n"

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
    return tmp_path / "promised"


@pytest.fixture
def other(folder: Path) -> Iterator[Other]:
    process = Other(folder)
    yield process
    process.end()


def test_what_another_process_was_promised_is_not_free_until_it_is_written(folder: Path, other: Other) -> None:
    assert promised.unwritten(folder) == pytest.approx(256 * MIB, abs=8 * MIB)
    other.does("write")
    assert promised.unwritten(folder) < 8 * MIB, "the system counts it now; it would count twice"


def test_what_is_dropped_is_free_again(folder: Path, other: Other) -> None:
    other.does("drop")
    assert promised.unwritten(folder) == 0


def test_a_process_that_was_killed_has_no_promise(folder: Path, other: Other) -> None:
    other.end()
    assert promised.unwritten(folder) == 0
    assert [note.name for note in folder.iterdir()] == ["lock"]


def test_what_is_promised_cannot_be_promised_again(folder: Path, other: Other) -> None:
    with pytest.raises(BackplaneError, match=r"0.25 GiB was free and 0.0\d GiB are left of it.*start this one again"):
        promised.promise(256 * MIB, 300 * MIB, folder)
    promised.promise(16 * MIB, 300 * MIB, folder)
    assert promised.unwritten(folder) == pytest.approx(272 * MIB, abs=8 * MIB)
    promised.withdraw(16 * MIB, folder)
    assert promised.unwritten(folder) == pytest.approx(256 * MIB, abs=8 * MIB)


def test_the_device_deducts_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promised.unwritten, "__defaults__", (folder,))
    before = CpuDevice().memory()
    promised.promise(4096 * MIB, 1 << 40, folder)
    after = CpuDevice().memory()
    assert before.free - after.free > 3072 * MIB, "the machine's own ups and downs are smaller"
    assert after.total == before.total


@pytest.mark.parametrize("text", ["", "{", "[]", '{"bytes": -5, "resident": 0, "begun": 0}', '{"bytes": "x"}'])
def test_notes_that_are_none_count_for_nothing(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / f"{os.getpid()}-{os.getuid()}").write_text(text)
    assert promised.unwritten(folder) == 0


def test_a_process_that_got_the_number_of_another_has_no_promise(folder: Path) -> None:
    folder.mkdir()
    begun = psutil.Process().create_time() - 100
    (folder / f"{os.getpid()}-{os.getuid()}").write_text(json.dumps({"bytes": MIB, "resident": 0, "begun": begun}))
    assert promised.unwritten(folder) == 0


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackplaneError, match="set TMPDIR"):
        promised.promise(1, 1 << 40, tmp_path / "file")


@pytest.mark.parametrize("name", ["7x", "7-7-7", "99999999999999999999-0"])
def test_a_name_that_is_no_number_counts_for_nothing(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / name).write_text(json.dumps({"bytes": MIB, "resident": 0, "begun": 0}))
    assert promised.unwritten(folder) == 0


def test_a_note_that_cannot_be_written_is_an_error_with_a_remedy(folder: Path) -> None:
    (folder / f"{os.getpid()}-{os.getuid()}").mkdir(parents=True)
    with pytest.raises(BackplaneError, match=f"{folder} cannot be used.*remove it, or set TMPDIR"):
        promised.promise(MIB, 1 << 40, folder)


ANOTHER_USER = """
import os, sys
from pathlib import Path
from vllm_backplane.devices.cpu import memory_ledger as promised

folder = Path(sys.argv[1])
promised.promise(1 << 20, 1 << 40, folder)  # as root, whose notes are in a folder where nobody removes another's
[own] = [note for note in folder.iterdir() if note.name != "lock"]
for left in (folder / str(os.getpid()), own):
    left.write_text('{"bytes": 1048576, "resident": 0, "begun": 1}')  # of a process that had this number before
os.setuid(65534)
promised.promise(2 << 20, 1 << 40, folder)
print(promised.unwritten(folder))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_stale_note_of_another_user_is_in_nobodys_way() -> None:
    with tempfile.TemporaryDirectory() as above:  # pytest's own folders are closed to others
        os.chmod(above, 0o755)
        run = subprocess.run(
            [sys.executable, "-c", ANOTHER_USER, f"{above}/promised"], capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) == pytest.approx(2 * MIB, abs=MIB)
