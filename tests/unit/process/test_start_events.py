"""Tests that steps of a start reach the log and the display, and that a missing display is ignored."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_backplane.process import start_events


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(start_events.VARIABLE, raising=False)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "events"
    os.mkfifo(path)
    return path


def announce(monkeypatch: pytest.MonkeyPatch, pipe: Path | str = "") -> None:
    monkeypatch.setenv(start_events.VARIABLE, json.dumps({"began": 0.0, "pipe": str(pipe)}))


def test_nothing_is_reported_without_an_announcement(vllm_log: Callable[[], list[str]]) -> None:
    start_events.report("weights", bytes=7)
    assert vllm_log() == []
    assert start_events.announced() is None


def test_a_step_is_one_line_of_the_log(monkeypatch: pytest.MonkeyPatch, vllm_log: Callable[[], list[str]]) -> None:
    announce(monkeypatch)
    start_events.report("model", name="a\nb \x1b[1m", path="/srv/a", bytes=7, size=None, page=True)
    (text,) = vllm_log()
    step, at, rest = text.removeprefix("Start: ").split(" ", 2)
    assert (step, at.partition("=")[0]) == ("step=model", "at")
    assert rest == r'name="a\nb \u001b[1m" path=/srv/a bytes=7 page=true'


def test_the_display_gets_every_step(monkeypatch: pytest.MonkeyPatch, pipe: Path) -> None:
    announce(monkeypatch, pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    start_events.report("weights", bytes=7)
    start_events.report_stopping()
    events = [json.loads(line) for line in os.read(reader, 1 << 16).splitlines()]
    os.close(reader)
    assert [event["step"] for event in events] == ["weights", "stopping"]
    assert events[0]["bytes"] == 7


def test_a_child_that_is_terminated_does_not_stop_the_server(monkeypatch: pytest.MonkeyPatch, pipe: Path) -> None:
    announce(monkeypatch, pipe)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    start_events.report_stopping()
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    os.close(reader)
    os.close(writer)


def test_the_signal_of_an_end_is_not_logged(monkeypatch: pytest.MonkeyPatch, vllm_log: Callable[[], list[str]]) -> None:
    announce(monkeypatch)
    start_events.report(start_events.STOPPING)
    start_events.report(start_events.END, status=1)
    assert vllm_log() == []


def test_a_display_that_has_ended_does_not_matter(monkeypatch: pytest.MonkeyPatch, pipe: Path) -> None:
    announce(monkeypatch, pipe)
    start_events.report("weights")  # nobody reads the pipe
    announce(monkeypatch, pipe.parent / "nothing")
    start_events.report("weights")


def test_an_event_is_written_at_once(monkeypatch: pytest.MonkeyPatch, pipe: Path) -> None:
    """The kernel would mix a longer one with those of other processes."""
    announce(monkeypatch, pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    start_events.report("model", name="\x1b" * 100_000, reason="é" * 100_000)
    line = os.read(reader, 1 << 20)
    os.close(reader)
    assert len(line) <= start_events.LONGEST_EVENT
    assert json.loads(line)["name"].startswith("\x1b" * 100)


def test_an_announcement_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(start_events.VARIABLE, "")
    start_events.announce(start_events.Start(1.5, "/srv/a b", filters=True))
    assert start_events.announced() == start_events.Start(1.5, "/srv/a b", filters=True)
    assert os.environ[start_events.VARIABLE]
