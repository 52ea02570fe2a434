"""Checks keys, slots and checksums of KV offload, without an engine."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy
import psutil
import pytest
import torch

from vllm_backplane.errors import BackplaneError, OptionError
from vllm_backplane.host.memory_ledger import MemoryLedger
from vllm_backplane.kv_offload import slots as slots_module
from vllm_backplane.kv_offload.block_index import BlockIndex
from vllm_backplane.kv_offload.block_keys import KeyChain
from vllm_backplane.kv_offload.cache_rows import CacheRows
from vllm_backplane.kv_offload.settings import parse
from vllm_backplane.kv_offload.slots import FileSlots, MemorySlots, Slots
from vllm_backplane.kv_offload.store import BlockStore, BlockUnavailable, Outcome

SIZE = 64


def row(number: int) -> numpy.ndarray:
    return numpy.random.default_rng(number).integers(0, 256, SIZE, numpy.uint8)


def key(number: int) -> bytes:
    return KeyChain(1, None).up_to([number], 1)[0]


# --- keys


def test_a_key_stands_for_everything_before_it() -> None:
    tokens = list(range(12))
    keys = KeyChain(4, None).up_to(tokens, 3)
    assert len(set(keys)) == 3
    assert KeyChain(4, None).up_to([99, *tokens[1:]], 3)[2] != keys[2], "the first token differs"
    assert KeyChain(4, None).up_to(tokens[4:8], 1)[0] != keys[1], "no block comes before"
    assert KeyChain(4, "mine").up_to(tokens, 3)[0] != keys[0]
    assert KeyChain(4, "").up_to(tokens, 1)[0] != keys[0]
    assert KeyChain(2, None).up_to(tokens, 2)[1] != keys[0]


def test_keys_grow_with_the_sequence() -> None:
    chain, tokens = KeyChain(4, None), list(range(5))
    first = chain.up_to(tokens, 1)
    tokens += range(5, 9)
    assert chain.up_to(tokens, 2) == KeyChain(4, None).up_to(tokens, 2)
    assert chain.up_to(tokens, 1) == first
    with pytest.raises(ValueError, match="not full"):
        chain.up_to(tokens, 3)


# --- slots of blocks


def test_what_was_used_longest_ago_makes_room() -> None:
    index = BlockIndex(2)
    slots = [index.allocate(key(number)) for number in range(2)]
    index.touch(key(0))
    assert index.allocate(key(2)) == slots[1]
    assert [index.find(key(number)) for number in range(3)] == [slots[0], None, slots[1]]
    assert (len(index), index.evicted) == (2, 1)


def test_a_slot_that_is_read_is_not_given_away() -> None:
    index = BlockIndex(1)
    slot = index.allocate(key(0))
    assert slot is not None
    index.pin(slot)
    index.pin(slot)
    assert index.allocate(key(1)) is None
    index.remove(key(0))  # damaged, while its slot is still being read
    index.unpin(slot)
    assert index.allocate(key(1)) is None
    index.unpin(slot)
    assert index.allocate(key(1)) == slot


def test_clearing_gives_all_slots_back_but_those_being_read() -> None:
    index = BlockIndex(2)
    first, _ = index.allocate(key(0)), index.allocate(key(1))
    assert first is not None
    index.pin(first)
    index.clear()
    assert len(index) == 0
    assert index.allocate(key(2)) == 1 - first
    assert index.allocate(key(3)) == 1 - first, "the other is pinned"


# --- bytes


@pytest.fixture(params=["memory", "file"])
def slots(request: pytest.FixtureRequest, tmp_path: Path) -> Slots:
    return MemorySlots(3, SIZE) if request.param == "memory" else FileSlots(tmp_path, 3, SIZE)


def test_what_is_written_is_read(slots: Slots) -> None:
    store = BlockStore(slots)
    for number in range(3):
        store.write(key(number), number, row(number))
    for number in range(3):
        assert (store.read(key(number)) == row(number)).all()
    store.close()


@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_changed_bit_is_noticed(slots: Slots, place: int, bit: int) -> None:
    store = BlockStore(slots)
    store.write(key(0), 1, row(0))
    changed = row(0)
    changed[place] ^= 1 << bit
    slots.write(1, changed)
    with pytest.raises(BlockUnavailable, match="fails its checksum") as refused:
        store.read(key(0))
    assert refused.value.outcome is Outcome.DAMAGED
    with pytest.raises(BlockUnavailable) as refused:  # it is removed from the store
        store.read(key(0))
    assert refused.value.outcome is Outcome.MISSING
    store.close()


def test_another_block_in_the_slot_is_noticed(slots: Slots) -> None:
    store = BlockStore(slots)
    store.write(key(0), 0, row(0))
    store.write(key(1), 0, row(1))
    with pytest.raises(BlockUnavailable):
        store.read(key(0))
    assert (store.read(key(1)) == row(1)).all()
    store.write(key(1), 2, row(1))  # moved
    slots.write(0, row(0))
    assert (store.read(key(1)) == row(1)).all()
    store.close()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = FileSlots(tmp_path, 2, SIZE)
    store = BlockStore(slots)
    store.write(key(0), 0, row(0))

    def refuse(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="no space"):
        store.write(key(1), 0, row(1))
    for number in range(2):
        with pytest.raises(BlockUnavailable):
            store.read(key(number))
    store.close()


# --- files


def test_a_file_has_no_name(tmp_path: Path) -> None:
    """The system removes an unnamed file, also when the process is killed."""
    slots = FileSlots(tmp_path, 1, SIZE)
    slots.write(0, row(0))
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) in slots.describe()
    slots.close()


def test_more_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackplaneError, match="lower 'capacity'"):
        FileSlots(tmp_path, 1 << 30, 1 << 30)
    with pytest.raises(BackplaneError, match=r"KV offload to host memory of .* does not fit: .*'folder'"):
        MemorySlots(1 << 30, 1 << 30)


def test_more_than_a_limit_of_the_process_leaves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = psutil.Process().memory_info().vms + (1 << 30)
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limit if number == resource.RLIMIT_AS else -1, -1))
    refused = r"^KV offload to host memory of 2\.00 GiB does not fit: .* are left within ulimit -v; lower 'capacity'"
    with pytest.raises(BackplaneError, match=refused):
        MemorySlots(2, 1 << 30)


def test_memory_is_reserved_until_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger(tmp_path / "ledger")
    monkeypatch.setattr(slots_module, "ledger", ledger)
    made = MemorySlots(1024, 1 << 16)
    assert ledger.unwritten_bytes() == pytest.approx(1 << 26, abs=1 << 23)
    made.close()
    assert ledger.unwritten_bytes() == 0
    MemorySlots(1024, 1 << 16)
    assert ledger.unwritten_bytes() == 0, "also without a call of close"


# --- the KV cache


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_a_block_comes_back_in_either_layout(order: tuple[int, ...]) -> None:
    """Layers may share a cache."""
    shape = (4, 2, 3, 5)
    made = [torch.randn([shape[dim] for dim in order]) for _ in range(2)]
    caches = [cache.permute([order.index(dim) for dim in range(4)]) for cache in made]
    rows = CacheRows([*caches, caches[0]], blocks=4)
    assert rows.row_bytes == 2 * 2 * 3 * 5 * 4
    kept, expected = rows.read(2), [cache[2].clone() for cache in caches]
    others = [cache[1].clone() for cache in caches]
    for cache in caches:
        cache[3] = 0
    rows.write(3, kept)
    for cache, wanted, other in zip(caches, expected, others, strict=True):
        assert torch.equal(cache[3], wanted)
        assert torch.equal(cache[1], other)


def test_a_cache_that_is_not_in_blocks_is_refused() -> None:
    with pytest.raises(BackplaneError, match="each block is contiguous"):
        CacheRows([torch.zeros(2, 4, 3).transpose(0, 1)], blocks=4)


# --- options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "lacks 'capacity'"),
        ({"capacity": "much"}, "a number of bytes"),
        ({"capacity": "1GiB", "foldr": "/tmp"}, "did you mean 'folder'"),
        ({"capacity": "1GiB", "folder": "tmp"}, "absolute path"),
        ({"capacity": "1GiB", "folder": "/nowhere/at/all"}, "is not a folder"),
    ],
)
def test_invalid_settings_are_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(given)
