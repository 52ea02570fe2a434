"""The process of a test file: the simulated NPU is loaded, with little memory, and nothing may run on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_backplane.devices.sim import SimDevice

MEMORY = 256 << 20

sim = SimDevice({"memory": MEMORY, "fallback": "forbid", "threads": 2, "sync_timeout": 30, "check_launches": 1})
sim.load()
sim.load_kernels()


@pytest.fixture
def device() -> SimDevice:
    return sim


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    """A failure of a launch belongs to the test that made it."""
    yield
    for card in range(torch.bpnpu.device_count()):
        torch.bpnpu.synchronize(card)
