"""Tests the statistics of engines that are measured in turns, without starting engines."""

from __future__ import annotations

import json

import pytest

from benchmarks import turns

# The machine was half as fast in the second turn, which does not change the ratio.
RESULTS = {
    "one": {"prompt of 512": [100.0, 50.0, 100.0], "decoding 1": [10.0, 10.0, 10.0]},
    "other": {"prompt of 512": [110.0, 55.0, 90.0], "decoding 1": [6.0, 6.5, 20.0]},
}


def test_names() -> None:
    assert turns.name_of((16, 1)) == "decoding 16"
    assert turns.name_of((1, 512)) == "prompt of 512"


def test_the_ratio_is_taken_turn_by_turn() -> None:
    ratios = turns.ratios_by_turn(RESULTS, "one", "other")
    assert ratios["prompt of 512"] == pytest.approx([1.1, 1.1, 0.9])
    assert ratios["decoding 1"] == pytest.approx([0.6, 0.65, 2.0])


@pytest.mark.parametrize(
    ("least", "status", "message"), [(None, 0, ""), (0.6, 0, ""), (0.7, 1, "decoding 1: below 0.7")]
)
def test_the_exit_status_shows_whether_any_workload_is_slow(
    least: float | None, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert turns.report("a title", RESULTS, least, False) == status
    shown = capsys.readouterr()
    assert "a title" in shown.out
    assert shown.err.strip() == message


def test_json_holds_every_turn(capsys: pytest.CaptureFixture[str]) -> None:
    turns.report("a title", RESULTS, None, True, limit="a limit")
    report = json.loads(capsys.readouterr().out)
    assert report["all"] == RESULTS
    assert report["limit"] == "a limit"
    lower, upper = report["quartiles"]["decoding 1"]
    assert report["ratio"]["decoding 1"] == pytest.approx(0.65)
    assert lower <= 0.65 <= upper


def test_one_turn_has_no_spread() -> None:
    assert turns.quartiles([0.6]) == (0.6, 0.6)
