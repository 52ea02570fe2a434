"""Tests the recorder of steps: reasons of eager steps, sampled steps, errors of the card."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_backplane import ops
from vllm_backplane.device.contract import Capabilities, Device, MemoryInfo, Probe
from vllm_backplane.errors import BackplaneError
from vllm_backplane.metrics import series, steps
from vllm_backplane.metrics.values_file import read
from vllm_backplane.ops.operator import declared
from vllm_backplane.ops.timing import OperatorTimes


class Card(Device):
    name, torch_type, dispatch_key = "card", "cpu", "CPU"
    capabilities = Capabilities()

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, 1)

    def memory(self, index: int = 0) -> MemoryInfo:
        return MemoryInfo(total=100, free=30)


def graphs(outcome: str = "") -> Any:
    return SimpleNamespace(calls={"one": 1}, suspended=False, outcome=outcome)


def recorder(path: Path, modes: steps.Modes, every: int = 0) -> steps.StepRecorder:
    return steps.StepRecorder(path / "worker-3", 3, SimpleNamespace(forward_began=0.0), Card(), 0, modes, every)


def values(path: Path) -> dict[Any, float]:
    return dict(read(path / "worker-3"))


CAPTURES = steps.Modes(graphs(), None, 1)
DRAFTS = steps.Modes(graphs(steps.NOT_CAPTURED), None, 3)
OFF = steps.Modes(None, steps.LORA, 1)


@pytest.mark.parametrize(
    ("modes", "tokens", "reason"),
    [
        (CAPTURES, [1, 1], ""),
        (CAPTURES, [1, 7], steps.PREFILL),
        (CAPTURES, [7], steps.PREFILL),
        (DRAFTS, [3, 3], steps.NOT_CAPTURED),
        (DRAFTS, [3, 1], steps.UNEVEN_DRAFTS),
        (DRAFTS, [1, 1, 1], steps.UNEVEN_DRAFTS),
        (DRAFTS, [3, 4], steps.PREFILL),
        (OFF, [1], steps.LORA),
        (OFF, [1, 2], steps.PREFILL),
        (steps.Modes(None, None, 1), [1], None),
    ],
)
def test_reasons(modes: steps.Modes, tokens: list[int], reason: str | None) -> None:
    named = {str(place): count for place, count in enumerate(tokens)}
    assert modes.eager_reason(named, sum(tokens), sampled=False) == reason
    if reason:
        assert reason in modes.reasons()


def test_parts_of_a_step(tmp_path: Path) -> None:
    one = recorder(tmp_path, CAPTURES)
    with one.forward({"a": 1}, 1):
        time.sleep(0.01)
        one._runner.forward_began = time.perf_counter()
        time.sleep(0.02)
    with one.sample():
        time.sleep(0.005)
    found = values(tmp_path)
    assert found[series.STEP_SECONDS, ("3", "inputs")] >= 0.01
    assert found[series.STEP_SECONDS, ("3", "forward")] >= 0.02
    assert found[series.STEP_SECONDS, ("3", "sample")] >= 0.005
    assert found[series.STEPS, ("3", "replayed", "")] == 1
    assert found[series.GRAPHS, ("3",)] == 1
    memory = [found[series.MEMORY, ("3", kind)] for kind in ("total", "used", "peak")]
    assert memory == [100, 70, 70]
    one.remove()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_measured_without_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests models that generate nothing: vLLM samples no tokens of theirs."""
    monkeypatch.setattr(steps, "MEMORY_SECONDS", 0.0)
    one = recorder(tmp_path, OFF)
    one._device.memory = lambda index=0: MemoryInfo(total=100, free=10)  # type: ignore[method-assign]
    with one.forward({"a": 5}, 5):
        pass
    assert values(tmp_path)[series.MEMORY, ("3", "used")] == 90


def test_a_failing_measurement_of_memory_is_logged_once_and_ends_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    monkeypatch.setattr(steps.logger, "error", lambda text, *values: errors.append(text % values))
    monkeypatch.setattr(steps, "MEMORY_SECONDS", 0.0)
    one = recorder(tmp_path, OFF)

    def fail(index: int = 0) -> MemoryInfo:
        raise BackplaneError("the ledger is damaged")

    one._device.memory = fail  # type: ignore[method-assign]
    for _ in range(2):
        with one.forward({"a": 1}, 1):
            pass
        with one.sample():
            pass
    [error] = errors
    assert "the ledger is damaged" in error
    found = values(tmp_path)
    assert found[series.STEPS, ("3", "eager", steps.LORA)] == 2
    assert found[series.MEMORY, ("3", "used")] == 70


def test_a_runner_that_does_not_mark_the_forward_pass_has_no_part_for_inputs(tmp_path: Path) -> None:
    one = steps.StepRecorder(tmp_path / "worker-3", 3, SimpleNamespace(), Card(), 0, OFF, 0)
    with one.forward({"a": 1}, 1):
        time.sleep(0.01)
    found = values(tmp_path)
    assert found[series.STEP_SECONDS, ("3", "forward")] >= 0.01
    assert (series.STEP_SECONDS, ("3", "inputs")) not in found


@pytest.mark.parametrize(
    ("error", "count"), [(torch.OutOfMemoryError("full"), 1), (torch.AcceleratorError("lost"), 1), (ValueError("x"), 0)]
)
def test_errors_of_the_card_are_counted_and_raised(tmp_path: Path, error: Exception, count: int) -> None:
    one = recorder(tmp_path, OFF)
    with pytest.raises(type(error)), one.forward({"a": 1}, 1):
        raise error
    with pytest.raises(type(error)), one.sample():
        raise error
    found = values(tmp_path)
    assert found[series.CARD_ERRORS, ("3",)] == 2 * count
    assert found[series.STEPS, ("3", "eager", steps.LORA)] == 0


def test_a_sampled_step_runs_eagerly_and_measures_operators(tmp_path: Path) -> None:
    captured = graphs()
    one = recorder(tmp_path, steps.Modes(captured, None, 1), every=2)
    x, weight = torch.ones(2, 4), torch.ones(4)
    seen = []
    for _ in range(4):
        with one.forward({"a": 1}, 1):
            seen.append(captured.suspended)
            ops.rms_norm.call(x, weight, 1e-6)
        assert not captured.suspended
        with one.sample():
            assert captured.suspended == seen[-1]
            ops.greedy_argmax.call(x)
        assert not captured.suspended
    assert seen == [False, True, False, True]
    found = values(tmp_path)
    assert found[series.SAMPLED_STEPS, ("3",)] == 2
    assert found[series.STEPS, ("3", "eager", steps.SAMPLED)] == 2
    assert found[series.STEPS, ("3", "replayed", "")] == 2
    measured = {labels[1] for (metric, labels), value in found.items() if metric == series.OPERATOR_SECONDS and value}
    assert measured == {"rms_norm", "greedy_argmax"}


def test_no_step_is_sampled_while_a_trace_or_the_guard_measures(tmp_path: Path) -> None:
    captured = graphs(steps.SUSPENDED)
    captured.suspended = True
    one = recorder(tmp_path, steps.Modes(captured, None, 1), every=1)
    with one.forward({"a": 1}, 1):
        pass
    assert captured.suspended
    without = steps.StepRecorder(tmp_path / "worker-4", 4, SimpleNamespace(), Card(), 0, OFF, 1, lambda: True)
    with without.forward({"a": 1}, 1):
        pass
    assert dict(read(tmp_path / "worker-4"))[series.SAMPLED_STEPS, ("4",)] == 0
    found = values(tmp_path)
    assert found[series.SAMPLED_STEPS, ("3",)] == 0
    assert found[series.STEPS, ("3", "eager", steps.SUSPENDED)] == 1


def test_operators_are_themselves_again_after_an_error() -> None:
    before = {name: one.call for name, one in declared().items()}
    times, waits = [], []
    measured = OperatorTimes(lambda name, seconds: times.append(name), lambda: waits.append(1))
    with measured.measured():
        assert ops.rms_norm.call is not before["rms_norm"]
        ops.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)
    with pytest.raises(RuntimeError, match="no tensor"), measured.measured():
        ops.rms_norm.call("no tensor")
    assert times == ["rms_norm", "rms_norm"]
    assert len(waits) == 3  # before and after the first call, before the second
    assert {name: one.call for name, one in declared().items()} == before


def test_a_call_inside_a_measured_call_counts_once() -> None:
    times: list[str] = []
    measured = OperatorTimes(lambda name, seconds: times.append(name), None)
    outer = measured._timed(SimpleNamespace(name="outer", call=lambda: ops.greedy_argmax.call(torch.ones(1, 2))))  # type: ignore[arg-type]
    with measured.measured():
        outer()
    assert times == ["outer"]
