"""Declares the operators that write the paged KV cache.

Keys and values are stored in blocks of ``block_size`` tokens; slot s is offset ``s % block_size`` of block
``s // block_size``. Usually K and V are the two halves of the last dimension of one tensor, and vLLM chooses
the order of blocks, heads and offsets in memory. An implementation must therefore use the strides of its arguments.

The references read no value on the host, so they can be queued and captured into a graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import (
    DEFAULT_TOLERANCES,
    EXACT,
    Sample,
    SampleSpace,
    Tolerance,
    nothing,
    operator,
)

_TOLERANCES = {
    **DEFAULT_TOLERANCES,
    # One unit in the last place: a kernel may multiply by the reciprocal of the scale instead of dividing.
    torch.float8_e4m3fn: Tolerance(0.13, 2e-3),
    torch.float8_e5m2: Tolerance(0.26, 2e-5),
}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of one-byte floats as bytes, because few devices can index such floats and all can index bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def paged_cache(
    space: SampleSpace,
    blocks: int,
    kv_heads: int,
    block_size: int,
    head: int,
    *,
    value_head: int | None = None,
    dtype: torch.dtype | None = None,
    nhd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V views of one tensor, [blocks, kv_heads, block_size, head] each, filled with random numbers.

    The memory layout is NHD (the heads of one token side by side) with `nhd`, otherwise HND.
    """
    width = head + (head if value_head is None else value_head)
    if nhd:
        cache = space.normal(blocks, block_size, kv_heads, width, dtype=dtype).transpose(1, 2)
    else:
        cache = space.normal(blocks, kv_heads, block_size, width, dtype=dtype)
    return cache[..., :head], cache[..., head:]


def _to_cache_dtype(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        raise OperatorError(f"kv_cache_write: the cache is {dtype}; pass it viewed as its floating-point type")
    if scale == 1.0 and dtype.itemsize > 1:
        return rows.to(dtype)
    wide = rows.float() / scale
    if dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        wide = wide.clamp(limits.min, limits.max)
    return wide.to(dtype)


def _write(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    used = slots >= 0
    # A padding token repeats the write of the first real token, because selecting the real tokens would need
    # their number on the host. If there is no real token at all, slot 0 is overwritten with its own value.
    first = used.to(torch.int32).argmax()
    source = torch.where(used, torch.arange(slots.shape[0], device=slots.device), first)
    slots = slots[source].clamp(min=0)
    block, offset = slots // cache.shape[2], slots % cache.shape[2]
    target = as_bits(cache)
    new = as_bits(_to_cache_dtype(rows, scale, cache.dtype))[source]
    target[block, :, offset] = torch.where(used.any(), new, target[0, :, 0])


def _write_samples(space: SampleSpace) -> Iterator[Sample]:
    def sample(
        label: str,
        slots: list[int],
        *,
        tokens: int | None = None,
        kv_heads: int = 2,
        head: int = 8,
        value_head: int | None = None,
        dtype: torch.dtype | None = None,
        nhd: bool = False,
        scales: tuple[float, float] = (1.0, 1.0),
        spread: float = 1.0,
    ) -> Sample:
        caches = paged_cache(space, 6, kv_heads, 4, head, value_head=value_head, dtype=dtype, nhd=nhd)
        count = len(slots) if tokens is None else tokens
        key = space.normal(count, kv_heads, head) * spread
        value = space.normal(count, kv_heads, value_head or head) * spread
        return Sample(label, (key, value, *caches, space.tensor(slots, torch.int64), *scales))

    yield sample("one token", [9])
    yield sample("several blocks, out of order", [5, 23, 0, 12, 4])
    yield sample("NHD layout", [5, 23, 0, 12, 4], nhd=True)
    yield sample("padding slots", [-1, 7, -1, 0, -1])
    yield sample("padding only", [-1, -1])
    yield sample("more tokens than slots", [3, 19], tokens=5)
    yield sample("no tokens", [])
    yield sample("one head, odd sizes", [1, 2, 22], kv_heads=1, head=5, value_head=3)
    yield sample("scaled", [8, 1, 14], scales=(0.5, 0.25))
    yield sample("other float", [8, 1, 14], dtype=torch.float16)
    for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield sample(f"{fp8}", [8, -1, 14], dtype=fp8)
        yield sample(f"{fp8}, scaled", [8, 1, 14], dtype=fp8, scales=(0.5, 0.25), nhd=True)
        yield sample(f"{fp8}, beyond its range", [8, 1, 14], dtype=fp8, scales=(1e-4, 1e-3), spread=100.0)


@operator(
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping,"
    " float k_scale, float v_scale) -> ()",
    samples=_write_samples,
    fake=nothing,
    tolerances=_TOLERANCES,
)
def kv_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Stores the keys and values of new tokens, divided by their scales, in the given cache slots.

    key, value [tokens, kv_heads, head]; caches [blocks, kv_heads, block_size, head], strided. Slots below 0
    are padding; tokens beyond the end of `slot_mapping` are not stored. One-byte floats saturate.
    """
    count = slot_mapping.shape[0]
    if count == 0:
        return
    slots = slot_mapping.long()
    _write(key[:count], key_cache, slots, k_scale)
    _write(value[:count], value_cache, slots, v_scale)


def _zero_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, ids in (("one block", [2]), ("several", [5, 0, 3]), ("none", []), ("twice the same", [1, 1])):
        yield Sample(label, (space.normal(6, 2, 4, 16), space.tensor(ids, torch.int64)))
    yield Sample("32-bit ids", (space.normal(6, 2, 4, 16), space.tensor([4, 1], torch.int32)))
    strided = space.normal(6, 4, 2, 16).transpose(1, 2)
    yield Sample("NHD layout", (strided, space.tensor([4, 1], torch.int64)))
    yield Sample("part of a wider cache", (space.normal(6, 2, 4, 16)[..., 8:], space.tensor([4], torch.int64)))
    fp8 = space.normal(6, 2, 4, 16, dtype=torch.float8_e4m3fn)
    yield Sample("one-byte floats", (fp8, space.tensor([4, 1], torch.int64)))


@operator(
    "(Tensor(a!) kv_cache, Tensor block_ids) -> ()",
    samples=_zero_samples,
    fake=nothing,
    tolerances=dict.fromkeys(_TOLERANCES, EXACT),
)
def kv_cache_zero_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Sets whole blocks of a cache to zero; blocks are its first dimension."""
    as_bits(kv_cache).index_fill_(0, block_ids.long(), 0)
