"""The time limit of an engine applies to each point, and results from before a failure are kept."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.compare import drivers
from benchmarks.compare.cli import measure, with_points
from benchmarks.compare.environments import Environments
from benchmarks.compare.results import Run
from benchmarks.compare.subjects import find as subject
from benchmarks.compare.variants import find
from benchmarks.compare.vllm_driver import generations
from benchmarks.compare.workloads import FULL, QUICK
from vllm_backplane.errors import BackplaneError

A_POINT = """
import json, pathlib, sys, time
result = [{"point": "1 sequence", "figures": {"decode": 5.0}}]
pathlib.Path(sys.argv[2]).write_text(json.dumps(result))
"""
THEN_STUCK = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores SIGINT for its background jobs
time.sleep(600)
"""
NOTHING = "print('nothing to say')"


class Slow:
    """Stands in for a process that runs into every time limit until it ends, and may write a result before each."""

    def __init__(self, result: Path, results: int, ends_after: int) -> None:
        self.result, self.results, self.ends_after, self.waits = result, results, ends_after, 0

    def wait(self, seconds: float) -> None:
        self.waits += 1
        if self.waits == self.ends_after:
            return
        if self.waits <= self.results:
            self.result.write_text("a point")
            os.utime(self.result, (self.waits, self.waits))
        raise subprocess.TimeoutExpired("an engine", seconds)


def test_every_answer_gives_an_engine_its_time_again(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "result", results=3, ends_after=4)
    drivers.wait(cast(Any, slow), 1.0, slow.result)
    assert slow.waits == 4


def test_an_engine_that_answers_no_more_is_not_waited_for(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "result", results=2, ends_after=9)
    with pytest.raises(subprocess.TimeoutExpired):
        drivers.wait(cast(Any, slow), 1.0, slow.result)
    assert slow.waits == 3


@pytest.fixture
def instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Run]:
    """Returns a function that measures with another program in place of the engine."""
    popen = subprocess.Popen
    program = tmp_path / "program.py"
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: popen([command[0], str(program), *command[2:]], **options)
    )

    def measured(text: str) -> Run:
        program.write_text(text)
        run = Run({}, {}, "", "", "")
        job = drivers.Job(subject("tiny"), Environments(tmp_path), 1, 5.0, lambda _: None)
        measure(job, QUICK[0], [find("ours/fp32")], 2, run)
        return run

    return measured


@pytest.mark.process
def test_what_was_measured_before_a_failure_is_kept(instead: Callable[[str], Run]) -> None:
    run = instead(A_POINT + THEN_STUCK)
    assert [(sample.point, sample.round, sample.value) for sample in run.samples] == [("1 sequence", 1, 5.0)]
    assert run.failures == {"ours/fp32": "made no progress within 5 s"}


@pytest.mark.process
def test_an_engine_that_ends_without_an_answer_has_failed(instead: Callable[[str], Run]) -> None:
    run = instead(NOTHING)
    assert run.samples == []
    assert run.failures == {"ours/fp32": "ended with 0: nothing to say"}


def test_a_few_tokens_warm_up_unless_nothing_follows() -> None:
    point = {"name": "peak", "output": 32}
    assert [one["output"] for one in generations(point, 2)] == [4, 32, 32]
    assert generations(point, 0) == [point]


def test_points_can_be_chosen_and_unknown_ones_are_named() -> None:
    kept = with_points(FULL, ["1 sequence", "prompt of 1024"])
    assert [[point.name for point in workload.points] for workload in kept] == [["1 sequence"], ["prompt of 1024"]]
    assert with_points(FULL, []) == list(FULL)
    with pytest.raises(BackplaneError, match="unknown point 3 sequences; these workloads have 1 sequence, 4 sequences"):
        with_points(FULL, ["3 sequences"])
