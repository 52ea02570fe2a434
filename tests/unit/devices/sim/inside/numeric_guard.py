"""Tests both parts of the numeric guard on the simulated card: checked module outputs and verified copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from vllm_backplane.devices.sim import SimDevice, library
from vllm_backplane.errors import NumericFault
from vllm_backplane.worker.numeric_guard import NumericGuard

CARD = torch.device("bpnpu", 0)


@pytest.fixture(autouse=True)
def clean(device: SimDevice) -> Iterator[None]:
    assert device.check_copies() is None
    yield
    library.driver("check_copies", 0)
    library.driver("faults_clear")
    library.driver("card_reset", 0)


def step(fault: str) -> str:
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4)).to(CARD)
    guard = NumericGuard(model, CARD, "here", submodules=True)
    x = torch.randn(5, 8).to(CARD)
    if fault:
        library.driver("faults_add", fault.encode())
    guard.begin(5, lambda: 5)
    try:
        with torch.inference_mode():
            model(x)
        guard.finish({"a": 2, "b": 3})
    except NumericFault as found:
        return str(found)
    return ""


def test_a_clean_step_is_clean() -> None:
    assert step("") == ""


def test_a_struck_launch_is_named_by_its_module() -> None:
    error = step("corrupt@launch=aten::silu*,kind=nan")
    assert "is that of 1 (SiLU): 1 NaN in its output (float32 [5, 16]" in error
    assert "in token 2 of 5 (request b)" in error  # the middle one of 80 values
    assert "Its inputs had no such values" in error


@pytest.mark.parametrize("way", ["copy_h2d", "copy_d2h", "copy_d2d"])
@pytest.mark.parametrize("count", [3, 50_000])
def test_a_struck_copy_is_named_as_one(way: str, count: int) -> None:
    source = torch.ones(count)

    def there_and_back() -> None:
        first, second = source.to(CARD), torch.empty(count, device=CARD)
        assert torch.equal(second.copy_(first).cpu(), source)

    there_and_back()
    library.driver("faults_add", f"corrupt@copy={way},kind=bitflip".encode())
    with pytest.raises(RuntimeError, match=f"copy '{way}' .* {count * 4} bytes differ from their source"):
        there_and_back()


def test_a_struck_copy_passes_where_copies_are_not_checked() -> None:
    library.driver("check_copies", 0)
    library.driver("faults_add", b"corrupt@copy=copy_d2h,kind=bitflip")
    assert (torch.ones(64).to(CARD).cpu() != 1).sum() == 1
