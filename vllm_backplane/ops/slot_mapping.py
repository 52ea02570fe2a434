"""Declares the operator that computes the KV-cache slot of each scheduled token.

A slot is `block * block_size + offset`. With context parallelism, runs of `cp_interleave` consecutive tokens
are distributed round-robin over the ranks, and a block of the table covers `block_size * cp_world_size`
positions; tokens of other ranks get the pad slot, which attention does not write. The blocks of a table may be
smaller than the allocation unit `block_size`, if attention needs smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.ops.operator import FLOAT32, FLOAT32_EXACT, Sample, SampleSpace, nothing, operator


def request_of_token(boundaries: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns the request of each of `num_tokens` tokens, given the cumulative sum of the requests' tokens.

    Tokens past the last request get the number of requests.
    """
    tokens = torch.arange(num_tokens, device=boundaries.device, dtype=torch.int64)
    return torch.searchsorted(boundaries.to(torch.int64).contiguous(), tokens, right=True)


def _samples(space: SampleSpace) -> Iterator[Sample]:
    def sample(label: str, lengths: list[int], first: list[int], size: int, *rest: int) -> Sample:
        start = [0]
        positions: list[int] = []
        for length, begin in zip(lengths, first, strict=True):
            start.append(start[-1] + length)
            positions += range(begin, begin + length)
        table = space.integers(100, len(lengths) + 1, 8, dtype=torch.int32)
        out = torch.full((start[-1] + 5,), 77, dtype=torch.int64).to(space.device)
        return Sample(
            label,
            (
                space.tensor(start, torch.int32),
                space.tensor(positions, torch.int64),
                table,
                out,
                size,
                -1,
                *rest,
            ),
        )

    yield sample("one request", [5], [0], 4)
    yield sample("prefill, decode and a request without tokens", [9, 1, 0, 3], [0, 17, 5, 15], 4)
    yield sample("no request", [], [], 16)
    yield sample("second rank of two", [10, 1], [0, 31], 4, 2, 1, 1)
    yield sample("runs of two over three ranks", [24], [0], 4, 3, 2, 2)
    yield sample("table of smaller blocks", [13, 2], [0, 5], 8, 1, 0, 1, 2)


@operator(
    "(Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor(a!) slot_mapping, int block_size,"
    " int pad_slot, int cp_world_size=1, int cp_rank=0, int cp_interleave=1,"
    " int? table_block_size=None) -> ()",
    samples=_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    pad_slot: int,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    table_block_size: int | None = None,
) -> None:
    """Writes the cache slot of each token, and the pad slot to the rest of `slot_mapping`.

    query_start_loc [requests + 1]; positions [tokens]; block_table [at least requests, blocks]. A block of the
    table has `table_block_size` tokens, a divisor of `block_size`, or `block_size` tokens if it is not given.
    """
    num_tokens = positions.shape[0]
    slot_mapping[num_tokens:].fill_(pad_slot)
    if num_tokens == 0:
        return
    request = request_of_token(query_start_loc[1:], num_tokens)
    # Tokens of no request (padding of the batch) have arbitrary positions; they get the pad slot.
    owned = request < query_start_loc.shape[0] - 1
    span = block_size * cp_world_size
    block, offset = positions // span, positions % span
    local = owned & ((offset // cp_interleave) % cp_world_size == cp_rank)
    local_offset = offset // (cp_world_size * cp_interleave) * cp_interleave + offset % cp_interleave
    rows = request.clamp(max=block_table.shape[0] - 1)
    size = block_size if table_block_size is None else table_block_size
    columns = torch.where(local, block * (block_size // size) + local_offset // size, 0)
    slots = block_table[rows, columns].to(torch.int64) * size + local_offset % size
    slot_mapping[:num_tokens] = torch.where(local, slots, pad_slot)
