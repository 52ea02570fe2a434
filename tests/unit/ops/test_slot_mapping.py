"""Tests the slot mapping against the definition of a block table, one token at a time."""

from __future__ import annotations

import pytest
import torch

from vllm_backplane import ops

PAD = -1


def run(
    lengths: list[int],
    first: list[int],
    table: torch.Tensor,
    block_size: int,
    world: int = 1,
    rank: int = 0,
    interleave: int = 1,
    table_block_size: int | None = None,
    room: int = 4,
    unowned: int = 0,
) -> list[int]:
    start = [0]
    positions: list[int] = []
    for length, begin in zip(lengths, first, strict=True):
        start.append(start[-1] + length)
        positions += range(begin, begin + length)
    positions += [10_000] * unowned
    out = torch.full((len(positions) + room,), 777, dtype=torch.int64)
    ops.compute_slot_mapping(
        torch.tensor(start, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int64),
        table,
        out,
        block_size,
        PAD,
        world,
        rank,
        interleave,
        table_block_size,
    )
    return out.tolist()


def expected(
    lengths: list[int],
    first: list[int],
    table: torch.Tensor,
    block_size: int,
    world: int,
    rank: int,
    interleave: int,
) -> list[int]:
    """Distributes positions to ranks in runs; each rank fills its own blocks in order."""
    slots: list[int] = []
    for request, (length, begin) in enumerate(zip(lengths, first, strict=True)):
        filled = 0
        place = {}
        for position in range(begin + length):
            owner = (position // interleave) % world
            if owner == rank:
                block, offset = divmod(filled, block_size)
                place[position] = int(table[request, block]) * block_size + offset
                filled += 1
        slots += [place.get(position, PAD) for position in range(begin, begin + length)]
    return slots


TABLE = torch.randperm(200, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(5, 40)


@pytest.mark.parametrize(
    ("world", "interleave"), [(1, 1), (2, 1), (2, 4), (3, 2), (4, 1)], ids=lambda value: str(value)
)
def test_every_rank(world: int, interleave: int) -> None:
    lengths, first = [13, 1, 0, 7], [0, 30, 5, 11]
    for rank in range(world):
        got = run(lengths, first, TABLE, 4, world, rank, interleave)
        assert got == expected(lengths, first, TABLE, 4, world, rank, interleave) + [PAD] * 4


def test_every_token_is_stored_by_exactly_one_rank() -> None:
    stored = [0] * 24
    for rank in range(3):
        for token, slot in enumerate(run([24], [0], TABLE, 4, 3, rank, 2, room=0)):
            stored[token] += slot != PAD
    assert stored == [1] * 24


def test_no_request() -> None:
    assert run([], [], TABLE, 16) == [PAD] * 4


def test_requests_without_tokens_at_both_ends() -> None:
    assert run([0, 2, 0], [3, 6, 8], TABLE, 4, room=0) == expected([0, 2, 0], [3, 6, 8], TABLE, 4, 1, 0, 1)


def test_tokens_of_no_request_are_padding() -> None:
    assert run([2], [0], TABLE, 4, unowned=3, room=0)[2:] == [PAD] * 3


def test_a_table_of_smaller_blocks_gives_the_same_memory() -> None:
    coarse = torch.tensor([[7, 2, 5]], dtype=torch.int32)
    # Block n of 8 tokens consists of four kernel blocks of 2 tokens, numbered from 4 * n.
    fine = torch.tensor([[4 * block + part for block in (7, 2, 5) for part in range(4)]], dtype=torch.int32)
    assert run([20], [1], coarse, 8) == run([20], [1], fine, 8, table_block_size=2)
