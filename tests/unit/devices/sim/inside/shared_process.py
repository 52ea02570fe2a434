"""Tests several engines in one process, which share cards that were started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_backplane.devices.sim import SimDevice
from vllm_backplane.devices.sim.library import driver
from vllm_backplane.errors import BackplaneError

CARD, OTHER = torch.device("bpnpu", 0), torch.device("bpnpu", 1)


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    torch.bpnpu.synchronize(0)


@pytest.fixture
def second(device: SimDevice) -> Iterator[SimDevice]:
    """Returns the device as a later engine gets it: the cards run already, and options are given again."""
    torch.ones(1, device=CARD)
    before = device.settings
    yield device
    device.settings = before
    device.set_current(0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory", 64 << 20),
        ("faults", "fail@launch=100"),
        ("model", "memory=1e9"),
        ("sync_timeout", 31),
        ("races", "report"),
        ("check_launches", 0),
    ],
)
def test_options_that_come_too_late_are_refused(second: SimDevice, key: str, value: object) -> None:
    assert second.faulty_settings() == ()
    second.settings = {**second.settings, key: value}
    [(what, remedy)] = second.faulty_settings()
    assert f"sim.{key} is {value!r}, and the cards of this process were started with" in what
    assert "a process of its own" in remedy


def test_options_that_can_change_do(second: SimDevice) -> None:
    matrix = torch.eye(2, device=CARD)
    second.settings = {**second.settings, "fallback": "allow", "threads": 1}
    assert second.faulty_settings() == ()
    second.set_current(0)
    assert torch.linalg.det(matrix).item() == 1
    second.settings = {**second.settings, "fallback": "forbid"}
    second.set_current(0)
    with pytest.raises(RuntimeError, match="forbidden"):
        torch.linalg.det(matrix)


def test_a_lost_card_concerns_those_who_use_it() -> None:
    """Runs last in this file, because the process cannot be used afterwards."""
    held = torch.empty(20 << 20, dtype=torch.uint8, device=CARD)
    driver("faults_add", b"lost@alloc=1,card=1")
    with pytest.raises(torch.AcceleratorError, match="card 1 is lost"):
        torch.empty(1, device=OTHER)
    driver("faults_clear")
    del held
    before = torch.bpnpu.memory_reserved()
    torch.bpnpu.empty_cache()
    assert torch.bpnpu.memory_reserved() < before
    with torch.bpnpu.device(1), pytest.raises((RuntimeError, BackplaneError), match="card 1 is lost"):
        torch.bpnpu.empty_cache()
