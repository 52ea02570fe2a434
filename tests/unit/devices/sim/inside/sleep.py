"""Tests sleep on the simulated NPU: kept contents return after waking up, others do not."""

from __future__ import annotations

import pytest
import torch
from conftest import sim

from vllm_backplane.devices.sim.library import driver
from vllm_backplane.devices.sim.sleep import Pool
from vllm_backplane.errors import BackplaneError
from vllm_backplane.worker.sleep import KV_CACHE, WEIGHTS, Sleeper

CARD, OTHER = torch.device("bpnpu", 0), torch.device("bpnpu", 1)


def test_a_deep_sleep_keeps_buffers_and_what_was_named() -> None:
    sleeper = Sleeper(sim, 0)
    with sleeper.pool(WEIGHTS):
        model = torch.nn.ModuleList(torch.nn.Linear(600, 600, device=CARD) for _ in range(2))
        model.register_buffer("table", torch.arange(1000.0, device=CARD))
    with sleeper.pool(KV_CACHE):
        torch.zeros(1 << 20, device=CARD)
    named, other = model[0].weight, model[1].weight
    before = [tensor.detach().cpu() for tensor in (named, other)]
    held = sim.own_memory(0)
    sleeper.sleep(2, [model], [named])
    assert held - sim.own_memory(0) >= 2 * named.nbytes
    sleeper.wake([KV_CACHE])
    sleeper.wake([WEIGHTS])
    assert torch.equal(model.table.cpu(), torch.arange(1000.0))
    assert torch.equal(named.detach().cpu(), before[0])
    assert not torch.equal(other.detach().cpu(), before[1]), "the memory was not given back"


def test_what_was_kept_is_that_of_the_last_sleep() -> None:
    """A sleep that failed must keep no contents, because a later restore would write them back."""
    pool = Pool(0)
    with pool.in_use():
        weights, freed = torch.full((1000,), 1.0, device=CARD), torch.ones(1000, device=CARD)
    driver("faults_add", b"hang@launch=1,card=1")
    try:
        torch.ones(1, device=OTHER).add_(1)  # hangs
        freed.record_stream(torch.bpnpu.current_stream(1))
        del freed
        with pytest.raises(BackplaneError, match="a stream of another card still works on"):
            pool.release(keep=True)
    finally:
        driver("release_hangs", -1)
        driver("faults_clear")
    torch.bpnpu.synchronize(1)
    pool.release(keep=False)
    pool.restore()
    assert not (weights == 1).any().item()


def test_waking_may_be_tried_again() -> None:
    pool = Pool(0)
    with pool.in_use():
        first, second = (torch.full((1000,), value, device=CARD) for value in (1.0, 2.0))
    pool.release(keep=True)
    driver("faults_add", b"fail@copy=copy_h2d,nth=2,card=0")
    try:
        with pytest.raises(BackplaneError, match="copy_h2d"):
            pool.restore()
    finally:
        driver("faults_clear")
    driver("card_reset", 0)
    pool.restore()
    assert ((first == 1) & (second == 2)).all().item()
    with pytest.raises(BackplaneError, match="not suspended"):
        pool.restore()
