"""Loads the simulated NPU in the process of a test file, with little memory and without fallback to the host."""

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
    """Synchronizes after each test, so that a failed launch fails the test that made it."""
    yield
    for card in range(torch.bpnpu.device_count()):
        torch.bpnpu.synchronize(card)
