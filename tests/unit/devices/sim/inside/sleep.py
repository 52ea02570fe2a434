"""Sleep on the simulated NPU: what a level keeps is there again after waking, and what it gives up is not."""

from __future__ import annotations

import torch
from conftest import sim

from vllm_backplane.worker.sleep import KV_CACHE, WEIGHTS, Sleeper

CARD = torch.device("bpnpu", 0)


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
