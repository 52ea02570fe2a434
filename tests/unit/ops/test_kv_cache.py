"""Tests the operators that write and zero KV blocks. Expected fp8 numbers follow the definition of the formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operator_checks import FLOAT_TYPES, exact, private, run, same_bits, samples, space

from vllm_backplane import ops
from vllm_backplane.errors import OperatorError

FP8 = {torch.float8_e4m3fn: (4, 7, 448.0), torch.float8_e5m2: (5, 15, 57344.0)}


def fp8_values(dtype: torch.dtype) -> np.ndarray:
    """Returns the non-negative finite numbers of a format in the order of their codes, from its definition."""
    exponent_bits, bias, largest = FP8[dtype]
    mantissa_bits = 7 - exponent_bits
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = 2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        if value > largest:
            break
        values.append(value)
    assert values[-1] == largest
    return np.array(values)


def to_fp8(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns the nearest representable number, with ties to the even code and saturation."""
    values = fp8_values(dtype)
    out = np.empty(x.shape)
    for index, number in np.ndenumerate(x):
        distance = np.abs(values - min(abs(float(number)), values[-1]))
        nearest = np.flatnonzero(distance == distance.min())
        code = next((c for c in nearest if c % 2 == 0), nearest[0])
        out[index] = np.copysign(values[code], number)
    return out


def stored(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> np.ndarray:
    divided = rows.float().numpy() / np.float32(scale)
    if dtype in FP8:
        return to_fp8(divided, dtype)
    return exact(torch.from_numpy(divided).to(dtype))


def expected_cache(rows: torch.Tensor, cache: torch.Tensor, slots: list[int], scale: float) -> np.ndarray:
    out, block_size = exact(cache).copy(), cache.shape[2]
    values = stored(rows, scale, cache.dtype)
    for token, slot in enumerate(slots):
        if slot >= 0:
            out[slot // block_size, :, slot % block_size] = values[token]
    return out


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_write_over_samples(dtype: torch.dtype) -> None:
    for sample in samples(ops.kv_cache_write, dtype):
        key, value, key_cache, value_cache, slots, k_scale, v_scale = sample.args
        after = run(ops.kv_cache_write, sample.args).args
        for rows, cache, scale, result in (
            (key, key_cache, k_scale, after[2]),
            (value, value_cache, v_scale, after[3]),
        ):
            expected = expected_cache(rows, cache, slots.tolist(), scale)
            np.testing.assert_array_equal(exact(result), expected, err_msg=sample.label)


@pytest.mark.parametrize("heads_inside", [False, True])
def test_slots_not_named_keep_every_bit(heads_inside: bool) -> None:
    whole = space(torch.float32).normal(5, 3, 4, 16)
    cache = whole.view(5, 4, 3, 16).transpose(1, 2) if heads_inside else whole
    before = cache.clone()
    key, value = space(torch.float32, 1).normal(4, 3, 8), space(torch.float32, 2).normal(4, 3, 8)
    slots = torch.tensor([6, -1, 19, 0])
    ops.kv_cache_write(key, value, cache[..., :8], cache[..., 8:], slots, 1.0, 1.0)
    for slot in range(20):
        row = cache[slot // 4, :, slot % 4]
        if slot in slots.tolist():
            token = slots.tolist().index(slot)
            assert torch.equal(row, torch.cat([key[token], value[token]], -1))
        else:
            assert torch.equal(row, before[slot // 4, :, slot % 4]), slot


@pytest.mark.parametrize("slots", [[-1, -1, -1], [-1, 0, -1], [0, -1, -1], [-1, -1, 7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_padding_anywhere(slots: list[int], dtype: torch.dtype) -> None:
    cache = space(torch.float32).normal(2, 1, 4, 4, dtype=dtype)
    source = space(torch.float32, 1)
    key, value = source.normal(3, 1, 2), source.normal(3, 1, 2)
    mine = cache.clone()
    ops.kv_cache_write(key, value, mine[..., :2], mine[..., 2:], torch.tensor(slots), 1.0, 1.0)
    np.testing.assert_array_equal(exact(mine[..., :2]), expected_cache(key, cache[..., :2], slots, 1.0))
    np.testing.assert_array_equal(exact(mine[..., 2:]), expected_cache(value, cache[..., 2:], slots, 1.0))


@pytest.mark.parametrize("dtype", list(FP8))
def test_every_fp8_number_survives_a_round_trip(dtype: torch.dtype) -> None:
    values = fp8_values(dtype)
    numbers = torch.from_numpy(np.concatenate([values, -values])).float().view(-1, 1, 2)
    cache = torch.zeros(numbers.shape[0], 1, 1, 4).to(dtype)
    slots = torch.randperm(numbers.shape[0], generator=torch.Generator().manual_seed(0))
    # The scale is a power of two, which changes no digit.
    ops.kv_cache_write(numbers * 0.5, numbers * 4, cache[..., :2], cache[..., 2:], slots, 0.5, 4.0)
    assert torch.equal(cache[slots, :, 0, :2].float(), numbers)
    assert torch.equal(cache[slots, :, 0, 2:].float(), numbers)


@pytest.mark.parametrize("dtype", list(FP8))
def test_fp8_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    numbers = torch.tensor([[[1e9, -1e9, float("inf"), float("-inf"), float("nan"), 0.0]]])
    cache = torch.zeros(1, 1, 1, 12).to(dtype)
    ops.kv_cache_write(numbers, numbers, cache[..., :6], cache[..., 6:], torch.tensor([0]), 1.0, 1.0)
    largest = FP8[dtype][2]
    assert cache[0, 0, 0, :4].float().tolist() == [largest, -largest, largest, -largest]
    assert cache[0, 0, 0, 4].float().isnan()
    assert cache[0, 0, 0, 5].float() == 0


def test_32_bit_slots_and_strided_rows() -> None:
    fused = space(torch.float32).normal(3, 4, 6)
    key, value = fused[:, :2], fused[:, 2:]
    cache = torch.zeros(4, 2, 2, 12)
    slots = torch.tensor([5, 2, 7], dtype=torch.int32)
    ops.kv_cache_write(key, value, cache[..., :6], cache[..., 6:], slots, 1.0, 1.0)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(cache[slot // 2, :, slot % 2, :6], key[token])
        assert torch.equal(cache[slot // 2, :, slot % 2, 6:], value[token])


def test_a_cache_of_bytes_is_refused() -> None:
    cache = torch.zeros(1, 1, 1, 2, dtype=torch.uint8)
    with pytest.raises(OperatorError, match="viewed as"):
        ops.kv_cache_write.reference(
            torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), cache, cache.clone(), torch.tensor([0]), 1.0, 1.0
        )


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_zero_blocks_over_samples(dtype: torch.dtype) -> None:
    for sample in samples(ops.kv_cache_zero_blocks, dtype):
        cache, ids = sample.args
        (result, _) = run(ops.kv_cache_zero_blocks, sample.args).args
        for block in range(cache.shape[0]):
            if block in ids.tolist():
                assert not exact(result[block]).any(), sample.label
            else:
                assert same_bits(result[block], cache[block]), sample.label


def test_zeroing_a_view_leaves_the_rest_of_the_tensor() -> None:
    whole = space(torch.float32).normal(3, 2, 4, 8)
    (before,) = private((whole,))
    ops.kv_cache_zero_blocks(whole[..., :4], torch.tensor([1]))
    assert torch.equal(whole[..., 4:], before[..., 4:])
    assert not whole[1, ..., :4].any()
    assert torch.equal(whole[0], before[0])
    assert torch.equal(whole[2], before[2])


def test_zeroing_removes_nan() -> None:
    cache = torch.full((2, 1, 2, 2), float("nan"))
    ops.kv_cache_zero_blocks(cache, torch.tensor([0]))
    assert torch.equal(cache[0], torch.zeros(1, 2, 2))
    assert cache[1].isnan().all()
