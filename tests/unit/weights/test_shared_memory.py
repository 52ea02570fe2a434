"""Processes with the same weights have them in memory once, whatever becomes of the others."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.unit.model_loader.sharing_process import BYTES, LAYERS, WIDTH, made

from vllm_backplane.errors import BackplaneError
from vllm_backplane.weights.deduplication import SMALLEST, share
from vllm_backplane.weights.sealed_memory import Segment
from vllm_backplane.weights.shared_registry import Board

ROOT = Path(__file__).resolve().parents[3]
BIASES = LAYERS * WIDTH * 4


class Holder:
    """Another process with a model."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        command = [sys.executable, "-m", "tests.unit.model_loader.sharing_process", str(folder), str(seed)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.outcome = self._told()

    def _told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with status {self.process.wait(10)}"
        return dict(json.loads(line))

    def ask(self, what: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        return self._told()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    held: list[Holder] = []

    def start(seed: int = 1) -> Holder:
        held.append(Holder(tmp_path / "board", seed))
        return held[-1]

    yield start
    for one in held:
        one.kill()


def test_processes_share_and_outlive_each_other(hold: Callable[..., Holder]) -> None:
    first = hold()
    assert (first.outcome["found"], first.outcome["placed"], first.outcome["own"]) == (0, BYTES, BIASES)
    at_once = first.outcome["most"] - first.outcome["before"]
    assert at_once < 2 * WIDTH * WIDTH * 4 / 1024, "more than one matrix was in memory twice"
    alone = first.ask()
    second = hold()
    assert (second.outcome["found"], second.outcome["placed"]) == (BYTES, 0)
    together = [first.ask(), second.ask()]
    assert {one["result"] for one in together} == {alone["result"]}
    assert all(one["Rss"] >= BYTES // 1024 for one in together)
    assert sum(one["Pss"] for one in together) < 1.05 * BYTES / 1024
    grown = [one["whole"] - holder.outcome["bare"] for one, holder in zip(together, (first, second), strict=True)]
    assert 0.95 * BYTES / 1024 < sum(grown) < 1.25 * BYTES / 1024, "of all their memory"
    for one in (first, second):
        assert one.outcome["kept"] == 0
        given_back = one.outcome["before"] - one.outcome["after"]
        assert given_back >= 0.9 * BYTES / 1024, "what was moved was not given back"

    written = second.ask("write")
    assert written["result"] != alone["result"]
    assert written["Private_Dirty"] >= WIDTH * WIDTH * 4 // 1024
    assert first.ask()["result"] == alone["result"], "what one writes is its own"

    first.kill()
    third = hold()
    assert (third.outcome["found"], third.outcome["placed"]) == (BYTES, 0), "the second offers what it found"
    assert third.ask()["result"] == alone["result"]


def test_other_weights_are_not_shared(hold: Callable[..., Holder]) -> None:
    first, second = hold(1), hold(2)
    assert second.outcome["found"] == 0
    assert first.ask()["result"] != second.ask()["result"]


def notes(board: Board) -> list[Path]:
    return sorted(board.folder.glob("*.json"))


def test_nothing_is_left_of_a_process_that_ended(hold: Callable[..., Holder], tmp_path: Path) -> None:
    board = Board(tmp_path / "board")
    hold().kill()
    [left] = notes(board)
    outcome = share(made(1), board)
    assert outcome.found == 0 and outcome.placed == BYTES and not outcome.unreachable
    assert left not in notes(board)
    assert notes(board) == [], "the model of this process is gone, and so is its note"


def test_a_process_that_cannot_be_looked_into(hold: Callable[..., Holder], tmp_path: Path) -> None:
    """As for one of another container."""
    board, first = Board(tmp_path / "board"), hold()
    [note] = notes(board)
    told = json.loads(note.read_text())
    told["offers"][0]["handle"] = 999
    note.write_text(json.dumps(told))
    outcome = share(made(1), board)
    assert outcome.found == 0 and outcome.placed == BYTES
    [reason] = outcome.unreachable
    assert str(first.process.pid) in reason


def test_an_offer_that_says_what_is_not_so(hold: Callable[..., Holder], tmp_path: Path) -> None:
    board, _ = Board(tmp_path / "board"), hold()
    [note] = notes(board)
    told = json.loads(note.read_text())
    places = told["offers"][0]["places"]
    keys = list(places)
    told["offers"][0]["places"] = dict(zip(keys, [*list(places.values())[1:], places[keys[0]]], strict=True))
    note.write_text(json.dumps(told))
    with pytest.raises(BackplaneError, match="offers weights that are not what it says; end it"):
        share(made(1), board)


def test_what_looks_at_one_memory_goes_on_doing_so(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.whole = torch.nn.Parameter(torch.randn(256, 256), requires_grad=False)
    model.tied = model.whole
    model.part = torch.nn.Parameter(model.whole.data[3:7].t(), requires_grad=False)
    model.register_buffer("beside", torch.randn(256, 256), persistent=False)
    model.plain = torch.randn(256, 256)
    copies = {name: getattr(model, name).clone() for name in ("whole", "part", "beside", "plain")}
    kept = model.plain.view(-1)
    before = kept.data_ptr()
    outcome = share(model, Board(tmp_path / "board"))
    assert outcome.placed == 3 * 256 * 256 * 4 and outcome.own == 0
    assert outcome.kept == 256 * 256 * 4, "the view above"
    assert model.plain.data_ptr() != before
    assert all(torch.equal(getattr(model, name), copy) for name, copy in copies.items())
    assert model.tied is model.whole
    model.whole[3, 0] = 5.0
    assert model.part[0, 0] == 5.0


def test_memory_that_is_not_pytorchs_is_left_alone(tmp_path: Path) -> None:
    """A buffer that was made of an array, which somebody else goes on reading."""
    array = numpy.random.default_rng(1).random((256, 256), dtype=numpy.float32)
    expected = array.copy()
    model = torch.nn.Module()
    model.register_buffer("table", torch.from_numpy(array))
    outcome = share(model, Board(tmp_path / "board"))
    assert outcome.placed == array.nbytes and model.table.data_ptr() != array.ctypes.data
    assert (array == expected).all() and (model.table.numpy() == expected).all()


def test_memory_that_is_missing_is_an_error() -> None:
    """Found when it is written to, part by part; the process lives."""
    segment = Segment.new(1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # Python does not let the signal end the process
    try:
        with pytest.raises(BackplaneError, match=r"0\.1 MiB of memory for weights .* cannot be had .*free memory"):
            segment.write(1 << 15, memoryview(bytes(1 << 17)))
        with pytest.raises(BackplaneError, match=r"4\.0 MiB of memory for weights .* or remove --load-format"):
            Segment.new(4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        segment.close()


def test_small_tensors_stay(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    place = model.weight.data_ptr()
    outcome = share(model, Board(tmp_path / "board"))
    assert model.weight.data_ptr() == place and SMALLEST > 8 * 8 * 4
    assert (outcome.placed, outcome.own) == (0, 8 * 8 * 4 + 8 * 4)


def test_one_after_another(tmp_path: Path) -> None:
    """A turn belongs to a process, so another one has it here."""
    board, waited = Board(tmp_path / "board"), threading.Event()
    program = (
        "import sys; from pathlib import Path; from vllm_backplane.weights.shared_registry import Board\n"
        f"with Board(Path({str(board.folder)!r})).turn(77, print): print('has it', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "has it\n"
        with board.turn(78, waited.set):
            assert not waited.is_set(), "another turn"

        def end() -> None:
            assert waited.wait(30)
            other.kill()

        ending = threading.Thread(target=end)
        ending.start()
        with board.turn(77, waited.set):
            assert waited.is_set()
        ending.join()


def test_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "board"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(BackplaneError, match=r"others than this user may write to it.*remove it, or set TMPDIR"):
        share(made(1), Board(folder))


def test_a_note_that_cannot_be_read(tmp_path: Path) -> None:
    board = Board(tmp_path / "board")
    board.folder.mkdir(mode=0o700)
    (board.folder / "1-2.json").write_text("{")
    with pytest.raises(BackplaneError, match=r"1-2\.json: JSONDecodeError.*remove it"):
        share(made(1), board)


def test_a_note_that_goes_while_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is given up takes its note away without waiting for anybody."""
    board = Board(tmp_path / "board")
    board.folder.mkdir(mode=0o700)
    note, glob = board.folder / "1-2.json", Path.glob

    def found_and_gone(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        note.unlink()
        return found

    note.write_text("{}")
    monkeypatch.setattr(Path, "glob", found_and_gone)
    assert board.offers() == []
