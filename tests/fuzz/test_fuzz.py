"""Runs the fuzz targets: the corpora in every test run, and changes of them in `make test-all`."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.environment import AT_START
from tests.fuzz.__main__ import CORPUS, all_targets
from tests.fuzz.campaign import Target, campaign

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SECONDS = 60
NAMES = sorted(path.name for path in CORPUS.iterdir())


def run(folder: Path, *arguments: str, timeout: float) -> dict[str, Any]:
    """Runs `python -m tests.fuzz` and returns its results."""
    results = folder / "results.json"
    command = [sys.executable, "-m", "tests.fuzz", *arguments, "--json", str(results), "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=AT_START, capture_output=True, text=True, timeout=timeout)
    assert results.exists(), done.stdout + done.stderr
    return dict(json.loads(results.read_text()))


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results for the corpora alone."""
    return run(tmp_path_factory.mktemp("fuzz"), "--runs", "0", timeout=300)


def test_every_target_has_a_corpus() -> None:
    assert list(all_targets()) and sorted(all_targets()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_corpus_breaks_no_rule(name: str, replayed: dict[str, Any]) -> None:
    assert replayed[name]["failures"] == []
    assert replayed[name]["accepted"] + replayed[name]["refused"] == len(list((CORPUS / name).iterdir()))
    assert replayed[name]["accepted"] > 0, "no input of the corpus is accepted, so accepted results were not compared"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_changes_of_the_corpus_break_no_rule(name: str, tmp_path: Path) -> None:
    """Tests changed inputs for a bounded time. Both outcomes must occur: changes may be too weak or too strong."""
    found = run(tmp_path, name, "--seconds", str(SECONDS), timeout=SECONDS + 240)[name]
    assert found["failures"] == []
    assert found["accepted"] > 20 and found["refused"] > 50, (found["accepted"], found["refused"])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_most_refusals_of_the_gguf_reader_are_reached(tmp_path: Path) -> None:
    """Tests the strength of the changes. Some checks are out of reach: a big-endian version takes four exact bytes."""
    from vllm_backplane.gguf import architectures, consistency, cursor, file, hf_config, tokenizer

    names = ("gguf-header", "gguf-file", "gguf-model", "gguf-tokenizer")
    results = run(tmp_path, *names, "--seconds", str(SECONDS), timeout=4 * SECONDS + 240)
    reached = {(place, line) for name in names for place, line in results[name]["lines"]}
    words = (
        "raise cursor.fault(",
        "raise self.fault(",
        "raise reader.fault(",
        "raise _fault(",
        "raise CheckpointError(",
    )
    for modules, missed in (((cursor, file), 0.2), ((consistency, architectures, hf_config, tokenizer), 0.35)):
        refusals = [
            (inspect.getsourcefile(module), number)
            for module in modules
            for number, line in enumerate(inspect.getsource(module).splitlines(), 1)
            if any(word in line for word in words)
        ]
        never = [place for place in refusals if place not in reached]
        assert len(refusals) > 20 and len(never) <= missed * len(refusals), f"not reached: {never}"


def hang(_data: bytes) -> None:
    while True:
        pass


def crash(_data: bytes) -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSEGV)


def take_memory(_data: bytes) -> None:
    bytearray(80 << 20)[:] = b"\1" * (80 << 20)


def wrong_exception(_data: bytes) -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("parser", "reason"),
    [
        (hang, "no result after"),
        (crash, "ended by signal SIGSEGV"),
        (take_memory, "bytes of memory"),
        (wrong_exception, "KeyError"),
    ],
)
def test_every_rule_can_be_broken(parser: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if parser is hang:
        monkeypatch.setattr("tests.fuzz.campaign.SECONDS", 0.5)
    report = campaign(Target("broken", parser, (ValueError,), ()), [b"one"], 0, 60, seed=0)
    [failure] = report.failures
    assert reason in failure.reason
    assert failure.data == b"one"


def some_fail(data: bytes) -> None:
    if data in (b"2", b"3", b"5"):
        raise KeyError(data)
    if data == b"4":
        raise ValueError("refused")
    if data == b"6":
        raise ValueError("refused") from MemoryError()


def test_a_campaign_goes_on_after_a_failure() -> None:
    report = campaign(Target("some", some_fail, (ValueError,), ()), [b"1", b"2", b"3", b"4", b"5", b"6"], 0, 60, seed=0)
    assert [failure.data for failure in report.failures] == [b"2", b"3", b"5", b"6"]
    assert "hides MemoryError" in report.failures[-1].reason
    assert (report.accepted, report.refused) == (1, 1)
