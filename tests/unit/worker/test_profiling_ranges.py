"""Tests that module ranges exist only while a trace is recorded, and are nested like the modules."""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import ProfilerConfig

from vllm_backplane.errors import BackplaneError
from vllm_backplane.worker import profiling
from vllm_backplane.worker.profiling import ModuleRanges, activities, profiler_hidden_from_vllm, require_writable_folder
from vllm_backplane.worker.worker import BackplaneWorker


class Failing(nn.Module):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


def hooks(model: nn.Module) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def traced(model: nn.Module) -> list[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, 4))
    return [event for event in profile.events() if "(" in event.name]


def test_modules_are_named_by_where_they_are() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])})
    inner = model["layers"][0]
    ranges = ModuleRanges(model)
    times = {event.name: event.time_range for event in traced(inner)}
    first, second = times["layers.0.0 (Linear)"], times["layers.0.1 (ReLU)"]
    assert first.end <= second.start
    ranges.remove()
    assert hooks(model) == 0
    assert traced(inner) == []


def test_a_module_that_raises_ends_its_range() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = Failing(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ArithmeticError):
                self.bad(x)
            time.sleep(0.001)
            return self.good(x)

    model = Outer()
    ranges = ModuleRanges(model)
    times = {event.name: event.time_range for event in traced(model)}
    bad, good, whole = (times[name] for name in ("bad (Failing)", "good (Linear)", "model (Outer)"))
    assert bad.end <= good.start and good.end <= whole.end
    assert ranges._open == []


def test_activities_that_cannot_be_recorded_are_refused(tmp_path: Path) -> None:
    config = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path))
    assert "CPU" in activities(config)
    config.torch_profiler_activities = ["CPU", "XPU"]
    with pytest.raises(BackplaneError, match=r"cannot record XPU here; choose .* among: CPU"):
        activities(config)


def test_the_configuration_is_back_whatever_happens(tmp_path: Path) -> None:
    given = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path))
    config: Any = SimpleNamespace(profiler_config=given)
    with profiler_hidden_from_vllm(config):
        assert config.profiler_config.profiler is None
    assert config.profiler_config is given
    with pytest.raises(ArithmeticError), profiler_hidden_from_vllm(config):
        raise ArithmeticError
    assert config.profiler_config is given


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    require_writable_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    require_writable_folder("s3://bucket/traces")
    (tmp_path / "file").write_text("")
    with pytest.raises(BackplaneError, match=r"traces cannot be written to .*torch_profiler_dir"):
        require_writable_folder(str(tmp_path / "file"))


def worker(model: nn.Module, folder: Path) -> BackplaneWorker:
    """Returns a worker that can record traces, made without starting a process."""
    made = BackplaneWorker.__new__(BackplaneWorker)
    made.profiler_config = ProfilerConfig(
        profiler="torch", torch_profiler_dir=str(folder), torch_profiler_with_stack=False
    )
    made.vllm_config = SimpleNamespace(profiler_config=made.profiler_config)  # type: ignore[assignment]
    made.rank = made.local_rank = 0
    made.profiler = made.trace = made.ranges = made.guard = None
    made.model_runner = SimpleNamespace(model=model, get_model=lambda: model)  # type: ignore[assignment]
    return made


def calls_of_a_step(made: BackplaneWorker, model: nn.Module) -> Counter[str]:
    """Counts the calls of profiling functions, Backplane's and PyTorch's, while a model computes."""
    found: Counter[str] = Counter()

    def count_call(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in (profiling.__file__, torch.autograd.profiler.__file__):
            found[frame.f_code.co_name] += 1

    sys.setprofile(count_call)
    try:
        with made._trace_range("step"):
            model(torch.ones(2, 4))
    finally:
        sys.setprofile(None)
    return found


def test_without_a_trace_a_step_meets_nothing_of_it(tmp_path: Path) -> None:
    """Before the first trace and after it, a step has no hook, no range and no call of the profiler."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    made = worker(model, tmp_path)

    def off() -> None:
        assert hooks(model) == 0 and calls_of_a_step(made, model) == {}
        assert made.profiler is made.trace is made.ranges is None
        assert isinstance(made._trace_range("step"), nullcontext)

    off()
    made._begin_trace(None, {})
    assert hooks(model) == 2 * 3
    assert calls_of_a_step(made, model)["begin"] == 3
    made._end_trace()
    off()
    assert list(tmp_path.glob("*.pt.trace.json*"))
