"""Ranges of modules are there while a trace is taken, inside of each other, and gone after it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import ProfilerConfig

from vllm_backplane.errors import BackplaneError
from vllm_backplane.worker.profiling import ModuleRanges, activities, insist_on_folder, unseen_by_vllm


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
    with unseen_by_vllm(config):
        assert config.profiler_config.profiler is None
    assert config.profiler_config is given
    with pytest.raises(ArithmeticError), unseen_by_vllm(config):
        raise ArithmeticError
    assert config.profiler_config is given


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    insist_on_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    insist_on_folder("s3://bucket/traces")
    (tmp_path / "file").write_text("")
    with pytest.raises(BackplaneError, match=r"traces cannot be written to .*torch_profiler_dir"):
        insist_on_folder(str(tmp_path / "file"))
