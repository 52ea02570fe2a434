"""Compares every torch.distributed operation between simulated cards of two processes with arithmetic on the host."""

from __future__ import annotations

import multiprocessing
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANKS = 2


def piece(rank: int, *shape: int) -> torch.Tensor:
    """Returns the input of a rank, which every rank can compute for every other."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def check(rank: int) -> None:
    other = 1 - rank
    card = torch.device("bpnpu", rank)
    ours, theirs = piece(rank, 4, 3), piece(other, 4, 3)
    both = [piece(0, 4, 3), piece(1, 4, 3)]

    def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
        assert got.device == card
        torch.testing.assert_close(got.cpu(), expected)

    x = ours.to(card)
    dist.all_reduce(x)
    equal(x, ours + theirs)
    x = ours.to(card)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    equal(x, torch.maximum(ours, theirs))
    x = ours.to(card)
    dist.broadcast(x, src=1)
    equal(x, both[1])
    x = ours.to(card)
    dist.reduce(x, dst=0)
    equal(x, ours + theirs if rank == 0 else ours)
    whole = torch.empty(8, 3, device=card)
    dist.all_gather_into_tensor(whole, ours.to(card))
    equal(whole, torch.cat(both))
    parts = [torch.empty(4, 3, device=card) for _ in range(RANKS)]
    dist.all_gather(parts, ours.t().contiguous().t().to(card))
    equal(torch.stack(parts), torch.stack(both))
    half = torch.empty(2, 3, device=card)
    dist.reduce_scatter_tensor(half, ours.to(card))
    equal(half, (ours + theirs)[2 * rank : 2 * rank + 2])
    got = torch.empty(4, 3, device=card)
    dist.all_to_all_single(got, ours.to(card))
    equal(got, torch.cat([both[0][2 * rank : 2 * rank + 2], both[1][2 * rank : 2 * rank + 2]]))
    if rank == 0:
        dist.send(ours.to(card), dst=1)
    else:
        dist.recv(x, src=0)
        equal(x, both[0])
    x = torch.zeros(5, device=card) + 1
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    equal(x * 3, torch.full((5,), 6.0))  # queued behind the wait, so it sees the sum
    on_host = torch.tensor([rank + 1])
    dist.all_reduce(on_host)  # what PyTorch itself sends over a group
    assert on_host.item() == 3
    dist.barrier()


def run(rank: int, meeting: str, answers: Any) -> None:
    try:
        from vllm_backplane.devices.sim import SimDevice

        sim = SimDevice({"memory": 64 << 20, "fallback": "forbid", "threads": 1})
        sim.load()
        sim.set_current(rank)
        dist.init_process_group(sim.collective_backend, init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
        check(rank)
        dist.destroy_process_group()
        answers.put("")
    except BaseException:
        answers.put(f"rank {rank}: {traceback.format_exc()}")
        raise


@pytest.mark.process
def test_every_collective(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    children = [context.Process(target=run, args=(rank, str(tmp_path / "meeting"), answers)) for rank in range(RANKS)]
    for child in children:
        child.start()
    errors = [answers.get(timeout=300) for _ in children]
    for child in children:
        child.join(300)
    assert errors == ["", ""], "\n".join(errors)
    assert [child.exitcode for child in children] == [0, 0]
