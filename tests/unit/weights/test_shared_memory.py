"""Checks that processes with the same weights share one copy, which outlives any of the processes."""

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

from tests.unit.weights.sharing_process import BYTES, LAYERS, WIDTH, made
from vllm_backplane.errors import BackplaneError
from vllm_backplane.weights.deduplication import MIN_SHARED_BYTES, share_weights
from vllm_backplane.weights.sealed_memory import Segment
from vllm_backplane.weights.shared_registry import WeightsRegistry

ROOT = Path(__file__).resolve().parents[3]
BIASES = LAYERS * WIDTH * 4


class Holder:
    """Runs another process with a model."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        command = [sys.executable, "-m", "tests.unit.weights.sharing_process", str(folder), str(seed)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.result = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with status {self.process.wait(10)}"
        return dict(json.loads(line))

    def measure(self, command: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        return self._read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    held: list[Holder] = []

    def start(seed: int = 1) -> Holder:
        held.append(Holder(tmp_path / "registry", seed))
        return held[-1]

    yield start
    for one in held:
        one.kill()


@pytest.mark.process
def test_processes_share_and_outlive_each_other(hold: Callable[..., Holder]) -> None:
    first = hold()
    assert (first.result["mapped"], first.result["placed"], first.result["private"]) == (0, BYTES, BIASES)
    at_once = first.result["peak"] - first.result["before"]
    assert at_once < 2 * WIDTH * WIDTH * 4 / 1024, "more than one matrix was in memory twice"
    alone = first.measure()
    second = hold()
    assert (second.result["mapped"], second.result["placed"]) == (BYTES, 0)
    together = [first.measure(), second.measure()]
    assert {one["result"] for one in together} == {alone["result"]}
    assert all(one["Rss"] >= BYTES // 1024 for one in together)
    assert sum(one["Pss"] for one in together) < 1.05 * BYTES / 1024
    grown = [one["whole"] - holder.result["bare"] for one, holder in zip(together, (first, second), strict=True)]
    # The weights are resident in both (Rss above); what else the heap gave back meanwhile makes the sum smaller.
    assert 0.85 * BYTES / 1024 < sum(grown) < 1.25 * BYTES / 1024, "of all their memory"
    for one in (first, second):
        assert one.result["duplicated"] == 0
        given_back = one.result["before"] - one.result["after"]
        assert given_back >= 0.9 * BYTES / 1024, "the old copies were not freed"

    written = second.measure("write")
    assert written["result"] != alone["result"]
    assert written["Private_Dirty"] >= WIDTH * WIDTH * 4 // 1024
    assert first.measure()["result"] == alone["result"], "what one writes is its own"

    first.kill()
    third = hold()
    assert (third.result["mapped"], third.result["placed"]) == (BYTES, 0), "the second has registered what it mapped"
    assert third.measure()["result"] == alone["result"]


@pytest.mark.process
def test_other_weights_are_not_shared(hold: Callable[..., Holder]) -> None:
    first, second = hold(1), hold(2)
    assert second.result["mapped"] == 0
    assert first.measure()["result"] != second.measure()["result"]


def registered(registry: WeightsRegistry) -> list[Path]:
    return sorted(registry.folder.glob("*.json"))


@pytest.mark.process
def test_nothing_is_left_of_a_process_that_ended(hold: Callable[..., Holder], tmp_path: Path) -> None:
    registry = WeightsRegistry(tmp_path / "registry")
    hold().kill()
    [left] = registered(registry)
    result = share_weights(made(1), registry)
    assert result.mapped == 0 and result.placed == BYTES and not result.unavailable
    assert left not in registered(registry)
    assert registered(registry) == [], "the model of this process is deleted, so its file must be removed"


@pytest.mark.process
def test_a_process_that_cannot_be_looked_into(hold: Callable[..., Holder], tmp_path: Path) -> None:
    """Denies access to the other process, as if it were in another container."""
    registry, first = WeightsRegistry(tmp_path / "registry"), hold()
    [file] = registered(registry)
    content = json.loads(file.read_text())
    content["offers"][0]["handle"] = 999
    file.write_text(json.dumps(content))
    result = share_weights(made(1), registry)
    assert result.mapped == 0 and result.placed == BYTES
    [reason] = result.unavailable
    assert str(first.process.pid) in reason


@pytest.mark.process
def test_registered_weights_that_differ_from_their_digest_are_rejected(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    registry, _ = WeightsRegistry(tmp_path / "registry"), hold()
    [file] = registered(registry)
    content = json.loads(file.read_text())
    places = content["offers"][0]["places"]
    keys = list(places)
    content["offers"][0]["places"] = dict(zip(keys, [*list(places.values())[1:], places[keys[0]]], strict=True))
    file.write_text(json.dumps(content))
    with pytest.raises(BackplaneError, match="registered weights that differ from their digest; terminate it"):
        share_weights(made(1), registry)


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
    result = share_weights(model, WeightsRegistry(tmp_path / "registry"))
    assert result.placed == 3 * 256 * 256 * 4 and result.private == 0
    assert result.duplicated == 256 * 256 * 4, "the view above"
    assert model.plain.data_ptr() != before
    assert all(torch.equal(getattr(model, name), copy) for name, copy in copies.items())
    assert model.tied is model.whole
    model.whole[3, 0] = 5.0
    assert model.part[0, 0] == 5.0


def test_memory_that_is_not_pytorchs_is_left_alone(tmp_path: Path) -> None:
    """Uses a buffer made from a numpy array, which other code still reads."""
    array = numpy.random.default_rng(1).random((256, 256), dtype=numpy.float32)
    expected = array.copy()
    model = torch.nn.Module()
    model.register_buffer("table", torch.from_numpy(array))
    result = share_weights(model, WeightsRegistry(tmp_path / "registry"))
    assert result.placed == array.nbytes and model.table.data_ptr() != array.ctypes.data
    assert (array == expected).all() and (model.table.numpy() == expected).all()


def test_memory_that_is_missing_is_an_error() -> None:
    """Memory that runs out is detected when a segment is written, and does not kill the process."""
    segment = Segment.create(1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(
            BackplaneError, match=r"0\.1 MiB of memory for weights .* cannot be allocated .*free memory"
        ):
            segment.write(1 << 15, memoryview(bytes(1 << 17)))
        with pytest.raises(BackplaneError, match=r"4\.0 MiB of memory for weights .* or remove --load-format"):
            Segment.create(4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        segment.close()


def test_small_tensors_stay(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    place = model.weight.data_ptr()
    result = share_weights(model, WeightsRegistry(tmp_path / "registry"))
    assert model.weight.data_ptr() == place and MIN_SHARED_BYTES > 8 * 8 * 4
    assert (result.placed, result.private) == (0, 8 * 8 * 4 + 8 * 4)


@pytest.mark.process
def test_one_after_another(tmp_path: Path) -> None:
    """Another process holds the lock."""
    registry, waited = WeightsRegistry(tmp_path / "registry"), threading.Event()
    program = (
        "import sys; from pathlib import Path; from vllm_backplane.weights.shared_registry import WeightsRegistry\n"
        f"with WeightsRegistry(Path({str(registry.folder)!r})).loading_lock(77, print):\n"
        "    print('has it', flush=True)\n"
        "    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "has it\n"
        with registry.loading_lock(78, waited.set):
            assert not waited.is_set(), "another lock"

        def end() -> None:
            assert waited.wait(30)
            other.kill()

        ending = threading.Thread(target=end)
        ending.start()
        with registry.loading_lock(77, waited.set):
            assert waited.is_set()
        ending.join()


def test_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(BackplaneError, match=r"other users may write to it.*remove it, or set TMPDIR"):
        share_weights(made(1), WeightsRegistry(folder))


def test_a_note_that_cannot_be_read(tmp_path: Path) -> None:
    registry = WeightsRegistry(tmp_path / "registry")
    registry.folder.mkdir(mode=0o700)
    (registry.folder / "1-2.json").write_text("{")
    with pytest.raises(BackplaneError, match=r"1-2\.json: JSONDecodeError.*remove it"):
        share_weights(made(1), registry)


def test_a_note_that_goes_while_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is deleted removes its file without taking the lock."""
    registry = WeightsRegistry(tmp_path / "registry")
    registry.folder.mkdir(mode=0o700)
    file, glob = registry.folder / "1-2.json", Path.glob

    def found_and_gone(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        file.unlink()
        return found

    file.write_text("{}")
    monkeypatch.setattr(Path, "glob", found_and_gone)
    assert registry.entries() == []
