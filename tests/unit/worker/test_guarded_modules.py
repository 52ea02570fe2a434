"""Tests which modules, values and requests the numeric guard reports, on small models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from vllm_backplane.device import Device, MemoryInfo, Probe
from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.errors import NumericFault
from vllm_backplane.worker import numeric_guard
from vllm_backplane.worker.numeric_guard import NumericGuard, watched_modules

TOKENS, WIDTH = 6, 8


class Part(nn.Module):
    """Computes x * weight + 1, or the values that a test plants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.plant: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        result = x * self.weight + 1
        return result if self.plant is None else self.plant(x, result)


class Layer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.norm = Part()
        self.rotary = shared
        self.mlp = Part()
        self.between: Any = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.rotary(self.norm(x))
        if self.between is not None:
            x = self.between(x)
        return self.mlp(x), x if residual is None else x + residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Part()
        self.embed = Part()
        self.layers = nn.ModuleList(Layer(shared) for _ in range(3))
        self.norm = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, residual = self.embed(x), None
        for layer in self.layers:
            x, residual = layer(x, residual=residual)
        return self.norm(x)


def put(*places: tuple[int, int], value: float = torch.nan) -> Any:
    def plant(_x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        for place in places:
            result[place] = value
        return result

    return plant


def step(
    model: nn.Module,
    *,
    tokens: int = TOKENS,
    submodules: bool = True,
    x: torch.Tensor | None = None,
    requests: Mapping[str, int] | None = None,
) -> str:
    """Returns the error of one step, or an empty string."""
    guard = NumericGuard(model, torch.device("cpu"), "rank 1 on card 1 of test", submodules=submodules)
    try:
        guard.begin(tokens, lambda: TOKENS)
        with torch.inference_mode():
            model(torch.arange(TOKENS * WIDTH).reshape(TOKENS, WIDTH).float() if x is None else x)
        guard.finish(requests)
    except NumericFault as fault:
        return str(fault)
    finally:
        guard.remove()
    return ""


def test_a_clean_step_reports_nothing() -> None:
    assert step(Model()) == ""


def flipped(value: float) -> float:
    """Returns the value with the highest bit of its exponent flipped."""
    return (torch.tensor(value).view(torch.int32) ^ 0x40000000).view(torch.float32).item()


@pytest.mark.parametrize("value", [0.1, -1e-7, 1.9])
def test_a_flipped_exponent_is_named_where_it_happened(value: float) -> None:
    model = Model()
    model.layers[1].mlp.plant = put((2, 3), value=flipped(value))
    error = step(model)
    assert "is that of layers.1.mlp (Part): " in error
    assert "Its inputs had no such values" in error


def test_a_number_that_is_only_huge_is_reported_as_such() -> None:
    model = Model()
    model.layers[1].mlp.plant = put((2, 3), value=-2e30)
    error = step(model)
    assert "the first output with values that are too large for a model is that of layers.1.mlp" in error
    assert "numbers beyond 1e+30 in its output (float32 [6, 8]; finite values from -2e+30 to" in error


@pytest.mark.parametrize("value", [9e29, -9e29])
def test_a_large_number_is_left_alone(value: float) -> None:
    model = Model()
    model.norm.plant = put((2, 3), value=value)
    assert step(model) == ""


def test_the_first_of_several_is_named_with_what_is_known() -> None:
    model = Model()
    model.layers[1].mlp.plant = put((2, 3), (2, 5), (4, 0))
    model.layers[2].norm.plant = put((0, 0), value=torch.inf)
    error = step(model, requests={"a": 2, "b": 1, "c": 3})
    assert "rank 1 on card 1 of test, step 1" in error
    assert "is that of layers.1.mlp (Part): 3 NaN in its output (float32 [6, 8]; finite values from" in error
    assert "in 2 tokens, the first 2 and the last 4 of 6 (some of the requests b, c)" in error
    # Embedding, three parts of one layer and two of the next have added one each: 0 to 47 has become 6 to 53.
    assert "Its inputs had no such values (input[0] float32 [6, 8]: finite values from 6 to 53)" in error
    assert "its parameters are finite" in error


def test_infinities_count_and_one_row_has_one_request() -> None:
    model = Model()
    model.embed.plant = put((3, 1), value=-torch.inf)
    error = step(model, requests={"a": 2, "b": 1, "c": 3})
    assert "embed (Part): 1 Inf in its output" in error
    assert "in token 3 of 6 (request c)" in error


def test_values_from_the_inputs_are_reported_as_such() -> None:
    model = Model()
    model.layers[2].between = lambda x: x.index_fill(0, torch.tensor([5]), torch.nan)
    error = step(model)
    assert "is that of layers.2.mlp (Part): 8 NaN" in error
    assert "They were in its inputs already (input[0] with 8 NaN): no module's output had them before" in error
    assert "after layers.2.rotary (Part), whose output was finite" in error


def test_bad_inputs_of_the_model_are_seen_where_they_enter() -> None:
    x = torch.zeros(TOKENS, WIDTH)
    x[1, 1] = torch.nan
    error = step(Model(), x=x)
    assert "is that of embed (Part): 1 NaN" in error
    assert "already (input[0] with 1 NaN), first in an input of the model (Model)" in error
    assert "so they came into the model with the step" in error


def test_a_bad_input_alone_is_no_alarm() -> None:
    """Masks are made of infinities."""
    model = Model()
    model.embed.plant = lambda x, result: result
    model.embed.forward = lambda x: torch.ones(TOKENS, WIDTH)  # type: ignore[method-assign]
    assert step(model, x=torch.full((TOKENS, WIDTH), -torch.inf)) == ""


def test_bad_parameters_are_named() -> None:
    model = Model()
    with torch.no_grad():
        model.layers[0].mlp.weight[3] = torch.nan
    error = step(model)
    assert "is that of layers.0.mlp (Part): 6 NaN" in error
    assert "its own parameters are bad: weight (1 values)" in error


def test_a_shared_module_has_the_name_of_the_layer_that_calls_it() -> None:
    model = Model()
    calls: list[int] = []

    def third_time(_x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return result * torch.nan if len(calls) == 3 else result

    model.layers[0].rotary.plant = third_time
    assert "is that of layers.2.rotary (Part): 48 NaN" in step(model)


def test_padding_is_not_looked_at() -> None:
    model = Model()
    model.layers[1].mlp.plant = put((4, 0), (5, 7))
    assert step(model, tokens=4) == ""
    assert "in token 4 of 6" in step(model, tokens=5)


def test_rows_that_are_no_tokens_are_all_looked_at() -> None:
    model = Model()
    model.norm.plant = lambda x, result: torch.cat([result, result])[:7].index_fill(0, torch.tensor([6]), torch.nan)
    assert "norm (Part): 8 NaN in its output (float32 [7, 8]" in step(model, tokens=1)
    assert "in row 6 of 7." in step(model, tokens=1, requests={"a": 1})


def test_rows_as_many_as_requests_are_theirs() -> None:
    model = Model()
    model.norm.plant = lambda x, result: result[:2] * torch.tensor([[1.0], [torch.nan]])
    assert "in row 1 of 2 (request b)" in step(model, requests={"a": 4, "b": 2})


def test_layers_alone_are_named_without_their_parts() -> None:
    model = Model()
    model.layers[1].norm.plant = put((0, 0))
    error = step(model, submodules=False)
    assert "is that of layers.1 (Layer): 1 NaN in its output[0]" in error
    assert "numeric_guard=modules checks its submodules" in error
    named = {name for watched in watched_modules(model, submodules=False) for name in watched.names}
    assert named == {"", "embed", "layers.0", "layers.1", "layers.2", "norm"}


@pytest.mark.parametrize(
    ("made", "label"),
    [
        (lambda bad: (bad[0], bad), "output[1]"),
        (lambda bad: [{"hidden": bad}], "output[0] hidden"),
        (lambda bad: {"a": 1, "b": None, "c": (bad,)}, "output c[0]"),
    ],
    ids=["tuple", "list of dict", "dict of tuple"],
)
def test_tensors_inside_of_results_are_found(made: Any, label: str) -> None:
    model = nn.Sequential(Part(), Part())
    model[1].plant = lambda x, result: made(put((1, 1))(x, result))
    error = step(model)
    assert f"is that of 1 (Part): 1 NaN in its {label} (" in error


def test_integers_are_ignored() -> None:
    model = nn.Sequential(Part())
    model[0].plant = lambda x, result: (torch.full((TOKENS,), -1), torch.tensor([True]), "text", None)
    assert step(model) == ""


def test_runs_that_are_no_steps_are_not_looked_at() -> None:
    model = Model()
    guard = NumericGuard(model, torch.device("cpu"), "here", submodules=True)
    model.embed.plant = put((0, 0))
    model(torch.zeros(TOKENS, WIDTH))
    guard.finish()
    guard.begin(TOKENS, lambda: TOKENS)
    model(torch.zeros(TOKENS, WIDTH))
    guard.abandon()
    model.embed.plant = None
    guard.begin(TOKENS, lambda: TOKENS)
    model(torch.zeros(TOKENS, WIDTH))
    guard.finish()


def test_a_fault_stays() -> None:
    model = Model()
    guard = NumericGuard(model, torch.device("cpu"), "here", submodules=True)
    guard.raise_if_failed()
    model.norm.plant = put((0, 0))
    guard.begin(TOKENS, lambda: TOKENS)
    model(torch.zeros(TOKENS, WIDTH))
    with pytest.raises(NumericFault, match=r"that of norm \(Part\)") as found:
        guard.finish()
    with pytest.raises(NumericFault, match=re.escape(str(found.value))):
        guard.raise_if_failed()


def test_more_tensors_than_a_table_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric_guard, "ROWS_OF_A_TABLE", 4)
    model = Model()
    assert step(model) == ""
    model.norm.plant = put((2, 2))
    assert "is that of norm (Part): 1 NaN" in step(model)


def test_hooks_do_not_change_results() -> None:
    model, x = Model(), torch.randn(TOKENS, WIDTH)
    expected = model(x)
    guard = NumericGuard(model, torch.device("cpu"), "here", submodules=True)
    guard.begin(TOKENS, lambda: TOKENS)
    assert torch.equal(model(x), expected)
    guard.finish()


def test_a_device_that_checks_no_copies_returns_the_reason() -> None:
    class Bare(Device):
        name, torch_type, dispatch_key = "bare", "cpu", "CPU"

        @classmethod
        def probe(cls) -> Probe:
            return Probe(available=True, count=1)

        def memory(self, index: int = 0) -> MemoryInfo:
            return MemoryInfo(total=1, free=1)

    assert Bare().check_copies() == "the device does not support it (Device.check_copies)"
    assert "nothing is copied" in (CpuDevice().check_copies() or "")
