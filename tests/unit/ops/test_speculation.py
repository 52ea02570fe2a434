"""Tests the inputs of a draft model against their description, one request and one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_backplane import ops

PAD = -1
OLD = 7


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def buffer(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full((size,), OLD, dtype=dtype)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


TABLE = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(torch.int32)[:40].view(5, 8)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("positions", [[3], [0, 14, 15, 13], []], ids=str)
def test_step(positions: list[int], in_place: bool) -> None:
    block_size, limit, batch = 2, 15, len(positions)
    seq_lens = ints([p + 1 for p in positions] + [OLD])
    now = ints(positions, torch.int64)
    out_positions = now if in_place else buffer(batch + 1, torch.int64)
    slots = buffer(batch + 2, torch.int64)
    ops.eagle_step_slot_mapping_metadata(now, TABLE, seq_lens, out_positions, slots, block_size, limit, PAD)
    for request, position in enumerate(positions):
        after = position + 1
        if after >= limit:
            assert (int(out_positions[request]), int(slots[request]), int(seq_lens[request])) == (0, PAD, 1)
        else:
            block, offset = divmod(after, block_size)
            assert int(out_positions[request]) == after
            assert int(slots[request]) == int(TABLE[request, block]) * block_size + offset
            assert int(seq_lens[request]) == position + 2
    assert slots[batch:].tolist() == [PAD, PAD]
    assert int(seq_lens[-1]) == OLD
    if not in_place:
        assert int(out_positions[-1]) == OLD


def test_step_does_not_read_past_the_table() -> None:
    slots = buffer(1, torch.int64)
    ops.eagle_step_slot_mapping_metadata(
        ints([40], torch.int64), TABLE, ints([41]), buffer(1, torch.int64), slots, 2, 1000, PAD
    )
    assert slots.tolist() == [int(TABLE[0, 7]) * 2 + 1]


def test_sequence_lengths_stop_at_the_models_length() -> None:
    lengths = ints([10])
    ops.eagle_step_slot_mapping_metadata(
        ints([3], torch.int64), TABLE, lengths, buffer(1, torch.int64), buffer(1, torch.int64), 2, 10, PAD
    )
    assert lengths.tolist() == [10]


@pytest.mark.parametrize(
    ("drafts", "accepted"),
    [([3, 2], [3, 2]), ([3, 2], [0, 0]), ([2, 0, 4], [1, 0, 4]), ([0], [0]), ([], [])],
    ids=str,
)
def test_where_to_sample(drafts: list[int], accepted: list[int]) -> None:
    cumulative = torch.tensor(drafts, dtype=torch.int64).cumsum(0).to(torch.int32)
    index, rejected = buffer(len(drafts)), buffer(len(drafts))
    lengths = [d + 1 for d in drafts]
    ops.eagle_prepare_inputs_padded(cumulative, ints([a + 1 for a in accepted]), starts(lengths), index, rejected)
    at = 0
    for request, (count, good) in enumerate(zip(drafts, accepted, strict=True)):
        assert int(rejected[request]) == count - good
        assert int(index[request]) == at + good
        at += count + 1


def test_a_prefill_without_drafts_samples_its_last_token() -> None:
    index, rejected = buffer(2), buffer(2)
    # The second request is a prompt of five tokens, none of which was sampled.
    ops.eagle_prepare_inputs_padded(ints([1, 1]), ints([1, 0]), starts([2, 5]), index, rejected)
    assert index.tolist() == [0, 6]
    assert rejected.tolist() == [1, 0]


def test_next_token() -> None:
    sampled = ints([5, 6, 7, 5, -1, -1, -1, -1, -1, 5, 6, 7, 5, 99, -1]).view(5, 3)
    discard = torch.tensor([False, False, False, True, False])
    backup = ints([20, 21, 22, 23, 24, 25])
    following, valid = buffer(5), buffer(5)
    ops.eagle_prepare_next_token_padded(sampled, discard, backup, following, valid, 90)
    assert following.tolist() == [7, 5, 22, 23, 5]
    assert valid.tolist() == [3, 1, 0, 0, 1]


def test_next_token_without_requests() -> None:
    empty = buffer(0)
    ops.eagle_prepare_next_token_padded(empty.view(0, 3), empty.bool(), ints([1]), empty, buffer(0), 90)


def expand_eagle(lengths: list[int], rejected: list[int], slots: int, shift: bool) -> tuple[dict[str, Any], dict]:
    generator = torch.Generator().manual_seed(5)
    total, requests = sum(lengths), len(lengths)
    tokens = torch.randint(0, 90, (total,), generator=generator, dtype=torch.int32)
    positions = torch.cat([torch.arange(100 * (r + 1), 100 * (r + 1) + n) for r, n in enumerate(lengths)])
    following = torch.randint(0, 90, (requests,), generator=generator, dtype=torch.int32)
    begin = starts(lengths)
    room = total + slots * requests + 3
    out: dict[str, Any] = {
        "ids": buffer(room),
        "positions": buffer(room, torch.int64),
        "rejected": torch.ones(room, dtype=torch.bool),
        "masked": torch.ones(room, dtype=torch.bool),
        "new": buffer(slots * requests),
        "hidden": buffer(total),
    }
    end = begin[1:] - 1 - ints(rejected)
    ops.copy_and_expand_eagle_inputs(tokens, positions, following, *out.values(), begin, end, 0, 95, slots, shift)
    # The description lists the contents of every slot of a request.
    expected: dict[str, Any] = {key: [] for key in out}
    expected["hidden"] = [OLD] * total
    for request, length in enumerate(lengths):
        first = int(begin[request])
        mine = tokens[first : first + length].tolist()
        good = mine[int(shift) : length - rejected[request]]
        row = len(expected["ids"])
        expected["ids"] += good + [int(following[request])] + [95] * (slots - 1) + [0] * rejected[request]
        used = len(good) + slots
        count = used + rejected[request]
        at = int(positions[first])
        expected["positions"] += list(range(at, at + used)) + [0] * rejected[request]
        expected["rejected"] += [False] * used + [True] * rejected[request]
        drafted = [False] * (len(good) + 1) + [True] * (slots - 1) + [False] * rejected[request]
        expected["masked"] += drafted
        expected["new"] += list(range(row + len(good), row + used))
        assert len(expected["ids"]) == row + count
        if shift:
            expected["hidden"][first : first + length] = list(range(row, row + length))
    return out, expected


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize(
    ("lengths", "rejected"),
    [([4, 1, 3], [1, 0, 2]), ([1], [0]), ([6, 2], [5, 0]), ([2, 2, 2], [1, 1, 1])],
    ids=str,
)
def test_expanding_for_a_draft_model(lengths: list[int], rejected: list[int], slots: int, shift: bool) -> None:
    out, expected = expand_eagle(lengths, rejected, slots, shift)
    for name, wanted in expected.items():
        assert out[name][: len(wanted)].tolist() == wanted, name
        rest = out[name][len(wanted) :].tolist()
        assert rest == [True if name in ("rejected", "masked") else OLD] * len(rest), name


def test_expanding_nothing() -> None:
    ids = buffer(3)
    none, flags = buffer(0), torch.ones(3, dtype=torch.bool)
    ops.copy_and_expand_eagle_inputs(
        none, none.long(), none, ids, buffer(3, torch.int64), flags, flags.clone(), none.clone(), buffer(0),
        starts([]), buffer(0), 0, 95, 2, True,
    )  # fmt: skip
    assert ids.tolist() == [OLD] * 3


@pytest.mark.parametrize("rejected", [None, [0, 0], [2, 1]], ids=str)
def test_expanding_for_a_block_parallel_draft_model(rejected: list[int] | None) -> None:
    lengths, drafts, size = [4, 2], 3, 2
    positions = ints([5, 6, 7, 8, 0, 1], torch.int64)
    following = ints([50, 60])
    ids, query_positions, query_slots = buffer(10), buffer(10, torch.int64), buffer(10, torch.int64)
    context_positions, context_slots = buffer(8, torch.int64), buffer(8, torch.int64)
    indices = buffer(len(lengths) * drafts)
    ops.copy_and_expand_dflash_inputs(
        following, positions, ids, context_positions, query_positions, context_slots, query_slots, indices,
        TABLE, starts(lengths), None if rejected is None else ints(rejected), 95, size, drafts + 1,
    )  # fmt: skip

    def slot(request: int, position: int) -> int:
        return int(TABLE[request, min(position // size, 7)]) * size + position % size

    assert context_positions.tolist() == [*positions.tolist(), OLD, OLD]
    assert context_slots.tolist() == [
        *(slot(0, p) for p in (5, 6, 7, 8)), *(slot(1, p) for p in (0, 1)), OLD, OLD
    ]  # fmt: skip
    lost = rejected or [0, 0]
    first = [8 - lost[0] + 1, 1 - lost[1] + 1]
    assert ids.tolist() == [50, 95, 95, 95, 60, 95, 95, 95, OLD, OLD]
    wanted = [(r, first[r] + offset) for r in range(2) for offset in range(drafts + 1)]
    assert query_positions.tolist() == [p for _, p in wanted] + [OLD, OLD]
    assert query_slots.tolist() == [slot(r, p) for r, p in wanted] + [OLD, OLD]
    assert indices.tolist() == [1, 2, 3, 5, 6, 7]
