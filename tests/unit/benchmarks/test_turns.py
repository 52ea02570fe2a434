"""Two engines in turns: what is made of their rates. The engines themselves are the benchmarks' business."""

from __future__ import annotations

import json

import pytest

from benchmarks import turns

# The machine was half as fast in the second turn; the ratio does not care.
RESULTS = {
    "one": {"prompt of 512": [100.0, 50.0, 100.0], "decoding 1": [10.0, 10.0, 10.0]},
    "other": {"prompt of 512": [110.0, 55.0, 90.0], "decoding 1": [6.0, 6.5, 20.0]},
}


def test_names() -> None:
    assert turns.name_of((16, 1)) == "decoding 16"
    assert turns.name_of((1, 512)) == "prompt of 512"


def test_the_ratio_is_taken_turn_by_turn() -> None:
    ratios = turns.by_turn(RESULTS, "one", "other")
    assert ratios["prompt of 512"] == pytest.approx([1.1, 1.1, 0.9])
    assert ratios["decoding 1"] == pytest.approx([0.6, 0.65, 2.0])


@pytest.mark.parametrize(("least", "status", "told"), [(None, 0, ""), (0.6, 0, ""), (0.7, 1, "decoding 1: below 0.7")])
def test_the_exit_status_tells_whether_any_workload_is_slow(
    least: float | None, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert turns.report("a title", RESULTS, least, False) == status
    shown = capsys.readouterr()
    assert "a title" in shown.out
    assert shown.err.strip() == told


def test_json_holds_every_turn(capsys: pytest.CaptureFixture[str]) -> None:
    turns.report("a title", RESULTS, None, True, limit="a limit")
    told = json.loads(capsys.readouterr().out)
    assert told["all"] == RESULTS
    assert told["limit"] == "a limit"
    lower, upper = told["quartiles"]["decoding 1"]
    assert told["ratio"]["decoding 1"] == pytest.approx(0.65)
    assert lower <= 0.65 <= upper


def test_one_turn_has_no_spread() -> None:
    assert turns.quartiles([0.6]) == (0.6, 0.6)
