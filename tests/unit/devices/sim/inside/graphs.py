"""Tests graphs of the simulated NPU: results equal those of eager steps, and typical mistakes are detected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import sim

from vllm_backplane import ops
from vllm_backplane.device.graph import CapturedCalls
from vllm_backplane.devices.sim.library import driver
from vllm_backplane.errors import BackplaneError, GraphError

CARD = torch.device("bpnpu", 0)


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm.call(ops.linear.call(x, weight, None), None, 1e-5, None) + x


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).to(CARD)


@pytest.fixture
def calls() -> CapturedCalls:
    return CapturedCalls(sim.new_graph)


@pytest.fixture
def hang() -> Iterator[Callable[[], Callable[[], None]]]:
    """Returns a function that stops card 0's default stream before its next launch and returns one that resumes it."""

    def release() -> None:
        driver("release_hangs", -1)

    def arm() -> Callable[[], None]:
        torch.bpnpu.synchronize()
        driver("faults_add", b"hang@launch=1,card=0,stream=0")
        return release

    yield arm
    release()
    driver("faults_clear")


def test_a_replay_computes_what_eager_does(calls: CapturedCalls, weight: torch.Tensor) -> None:
    for rows in (1, 2, 4):
        x = torch.zeros(rows, 16, device=CARD)
        calls.capture(rows, lambda x=x: layer(x, weight), {"x": x})
        for round in range(3):
            values = torch.randn(rows, 16, generator=torch.Generator().manual_seed(round))
            x.copy_(values)
            answer = calls.replay(rows, {"x": x})
            torch.testing.assert_close(answer.cpu(), layer(values, weight.cpu()))
    assert len(calls) == 3
    assert calls.replays == 9


def test_a_capture_computes_nothing_and_a_replay_is_one_entry(calls: CapturedCalls, weight: torch.Tensor) -> None:
    x = torch.ones(2, 16, device=CARD)
    target = torch.zeros(2, 16, device=CARD)
    torch.bpnpu.synchronize()
    before = torch.bpnpu.launch_counters()
    calls.capture("key", lambda: target.copy_(layer(x, weight)), {"x": x})
    torch.bpnpu.synchronize()
    assert torch.bpnpu.launch_counters() == before
    assert not target.any().item()
    calls.replay("key", {"x": x})
    assert target.any().item()
    assert torch.bpnpu.launch_counters()["graph_launches"] == before["graph_launches"] + 1


def test_another_tensor_as_input_is_refused(calls: CapturedCalls, weight: torch.Tensor) -> None:
    """Planted bug: the caller creates a new tensor instead of filling the captured one."""
    x = torch.ones(2, 16, device=CARD)
    calls.capture("key", lambda: layer(x, weight), {"x": x})
    fresh = x.clone()
    with pytest.raises(GraphError, match=r"input x is another tensor at the replay of key; .* stale data"):
        calls.replay("key", {"x": fresh})
    with pytest.raises(GraphError, match="input x has the shape"):
        calls.replay("key", {"x": x[:1]})
    with pytest.raises(GraphError, match="input x is absent"):
        calls.replay("key", {})
    with pytest.raises(GraphError, match="input y was not captured"):
        calls.replay("key", {"x": x, "y": fresh})
    with pytest.raises(GraphError, match="no graph was captured for other"):
        calls.replay("other", {"x": x})
    assert calls.replays == 0


def test_an_input_that_is_gone_is_refused(calls: CapturedCalls, weight: torch.Tensor) -> None:
    """Planted bug: the buffer that a graph reads was freed, and another tensor may use the memory."""
    x = torch.ones(3, 16, device=CARD)
    held = [torch.full((16,), 2.0, device=CARD)]
    calls.capture("key", lambda: layer(x, weight) * held[0], {"x": x})
    calls.replay("key", {"x": x})
    held.clear()
    gc.collect()
    torch.bpnpu.synchronize()
    torch.bpnpu.empty_cache()
    with pytest.raises(BackplaneError, match="graph_launch"):
        calls.replay("key", {"x": x})


def test_waiting_inside_a_capture_is_refused(calls: CapturedCalls, weight: torch.Tensor) -> None:
    """Planted bug: the step reads a result on the host, which a replay cannot repeat."""
    x = torch.ones(2, 16, device=CARD)

    def step() -> torch.Tensor:
        y = layer(x, weight)
        return y * y.sum().item()

    with pytest.raises(RuntimeError, match="captur"):
        calls.capture("key", step, {"x": x})
    assert "key" not in calls
    assert layer(x, weight).isfinite().all().item(), "the card works on"


def test_a_copy_of_pageable_memory_inside_a_capture_is_refused(calls: CapturedCalls) -> None:
    x = torch.ones(4, device=CARD)
    with pytest.raises(RuntimeError, match="captur"):
        calls.capture("key", lambda: x + torch.arange(4.0).to(CARD), {"x": x})


def test_a_result_that_is_not_waited_for_is_stale(calls: CapturedCalls, hang) -> None:
    """Planted bug: tokens are read from pinned memory before the copy has ended. A CPU device would hide it."""
    x = torch.zeros(4, device=CARD)
    tokens = torch.zeros(4, pin_memory=True)
    calls.capture("key", lambda: x * 2, {"x": x})
    x.fill_(3.0)
    release = hang()
    answer = calls.replay("key", {"x": x})
    tokens.copy_(answer, non_blocking=True)
    assert tokens.tolist() == [0, 0, 0, 0]
    release()
    torch.bpnpu.synchronize()
    assert tokens.tolist() == [6, 6, 6, 6]


def test_a_seed_is_for_what_comes_after_a_replay_in_flight(calls: CapturedCalls) -> None:
    x, slow = torch.zeros(4, device=CARD), torch.ones(800, 800, device=CARD)

    def step() -> torch.Tensor:
        slow @ slow  # seeds that do not wait come long before this is over
        return x.uniform_()

    calls.capture("key", step, {"x": x})
    torch.bpnpu.manual_seed(1)  # waits for what was drawn so far
    calls.replay("key", {"x": x})
    torch.bpnpu.manual_seed(5)
    after = torch.rand(4, device=CARD)
    numbers = torch.Generator()
    assert torch.equal(x.cpu(), torch.rand(4, generator=numbers.manual_seed(1)))
    assert torch.equal(after.cpu(), torch.rand(4, generator=numbers.manual_seed(5)))


def test_an_input_changed_before_the_replay_has_read_it(calls: CapturedCalls, hang) -> None:
    """Planted bug: pinned memory is filled for the next step before the copy of this step has run."""
    x = torch.zeros(4, device=CARD)
    calls.capture("key", lambda: x + 1, {"x": x})
    staged = torch.full((4,), 5.0, pin_memory=True)
    release = hang()
    held_up = torch.ones(1, device=CARD) + 1  # the launch that hangs, in front of the copy
    x.copy_(staged, non_blocking=True)
    answer = calls.replay("key", {"x": x})
    staged.fill_(100.0)  # no event was waited for
    release()
    assert answer.tolist() == [101, 101, 101, 101], "the next step's input, not this one's"
    assert held_up.item() == 2
