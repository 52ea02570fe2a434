"""Tests the linear operator with quantized weights: packing, the layout of codes, and the matrix product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operator_checks import FLOAT_TYPES, assert_near, check_over_samples, exact, space

from vllm_backplane import ops
from vllm_backplane.device import CodeLayout
from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.quantized_linear import packed, packed_codes, padded_size, unpacked_codes


def code(codes: np.ndarray, bits: int, feature: int, position: int) -> int:
    """Returns the index of a feature's code at an input position, by the definition of the layout."""
    block, column = divmod(feature, codes.shape[2])
    if bits == 8:
        stored = int(codes[block, position // 4, column, position % 4])
        return stored + 128 if (codes < 0).any() else stored
    step, within = divmod(position, 8)
    byte = int(codes[block, step, column, within % 4])
    return byte % 16 if within < 4 else byte // 16


def weights(
    codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None, bits: int, features: int, size: int
) -> np.ndarray:
    group = codes.shape[1] * (4 if bits == 8 else 8) // scales.shape[1]
    width = scales.shape[2]
    weight = np.empty((features, size))
    for feature, position in np.ndindex(weight.shape):
        place = (feature // width, position // group, feature % width)
        value = code(codes, bits, feature, position)
        if offsets is None:
            weight[feature, position] = scales[place] * (value - (128 if bits == 8 else 8))
        else:
            weight[feature, position] = scales[place] * value + offsets[place]
    return weight


def rounded(row: np.ndarray, group: int) -> np.ndarray:
    """Returns one row of x after dynamic quantization, group by group."""
    out = np.zeros(len(row))
    for start in range(0, len(row), group):
        part = row[start : start + group].astype(np.float32)
        amax = np.abs(part).max()
        if amax > 0:
            codes = np.clip(np.rint(part * (np.float32(127) / amax)), -127, 127)
            out[start : start + group] = codes.astype(np.float64) * float(amax) / 127
    return out


def product(
    x: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray | None,
    bits: int,
    features: int,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    weight = weights(codes, scales, offsets, bits, features, x.shape[-1])
    group = codes.shape[1] * (4 if bits == 8 else 8) // scales.shape[1]
    out = np.empty((*x.shape[:-1], features))
    for index in np.ndindex(x.shape[:-1]):
        out[index] = weight @ rounded(x[index], group)
    return out if bias is None else out + bias


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_over_samples(dtype: torch.dtype) -> None:
    check_over_samples(ops.quantized_linear, dtype, product)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("rows", "fan_in", "group", "width"), [(5, 40, 8, 4), (16, 64, 32, 16), (3, 24, 24, 1)])
def test_every_code_lies_where_the_layout_places_it(
    bits: int, rows: int, fan_in: int, group: int, width: int, signed: bool
) -> None:
    plain = space(torch.float32).integers(2**bits, rows, fan_in, dtype=torch.uint8)
    laid = packed_codes(plain, bits, CodeLayout(width, signed))
    assert laid.shape == (-(-rows // width), fan_in * bits // 32, width, 4)
    assert laid.is_contiguous() and laid.dtype == (torch.int8 if signed and bits == 8 else torch.uint8)
    for feature, position in np.ndindex(rows, fan_in):
        assert code(laid.numpy(), bits, feature, position) == plain[feature, position], (feature, position)
    assert torch.equal(unpacked_codes(laid, bits)[:rows], plain)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("group", "width"), [(32, 16), (8, 3), (64, 1), (0, 8)])
@pytest.mark.parametrize("bits", [8, 4])
def test_packing_is_within_half_a_step(bits: int, group: int, width: int, dtype: torch.dtype) -> None:
    weight = space(dtype).normal(21, 70) * 0.05
    made = packed(weight, bits, group, CodeLayout(width))
    padded = padded_size(70, group)
    assert made.offsets is None
    assert made.codes.shape == (-(-21 // width), padded * bits // 32, width, 4)
    assert made.scales.shape == (-(-21 // width), padded // (group or padded), width)
    assert made.scales.dtype == torch.float16
    scales = made.scales.double().numpy()
    back = weights(made.codes.numpy(), scales, None, bits, 21, 70)
    group = group or padded
    for feature, position in np.ndindex(21, 70):
        whole = exact(weight)[feature, position // group * group : (position // group + 1) * group]
        reached = np.abs(whole).max()
        step = reached / (7 if bits == 4 else 128)
        difference = abs(back[feature, position] - exact(weight)[feature, position])
        # Weights at the end of the range that has one code less lose up to a step.
        allowed = 1.0 * step if abs(exact(weight)[feature, position]) > 0.7 * reached else 0.52 * step
        assert difference <= allowed, (feature, position)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.006), (4, 0.105)])
def test_packing_loses_little(bits: int, bound: float) -> None:
    """Compares the relative quantization error of normally distributed weights with a bound."""
    weight = space(torch.float32).normal(64, 512)
    made = packed(weight, bits, 32, CodeLayout(16))
    back = weights(made.codes.numpy(), made.scales.double().numpy(), None, bits, 64, 512)
    assert np.linalg.norm(back - exact(weight)) / np.linalg.norm(exact(weight)) < bound


@pytest.mark.parametrize("bits", [8, 4])
def test_with_offsets_packing_is_within_half_a_step(bits: int) -> None:
    weight = space(torch.float32).normal(21, 70) * 0.05 + 0.1
    made = packed(weight, bits, 32, CodeLayout(8), symmetric=False)
    assert made.offsets is not None
    assert made.offsets.shape == made.scales.shape
    back = weights(made.codes.numpy(), made.scales.double().numpy(), made.offsets.double().numpy(), bits, 21, 70)
    for feature, position in np.ndindex(21, 70):
        # The end of a row is padded with zeros, which count as weights of its last group.
        whole = [
            *exact(weight)[feature, position // 32 * 32 : (position // 32 + 1) * 32],
            *([0.0] if position > 63 else []),
        ]
        step = (max(whole) - min(whole)) / (2**bits - 1)
        # Half a step, plus the rounding of offset and scale to float16.
        allowed = 0.5 * step + 2.0**-11 * (abs(min(whole)) + max(whole) - min(whole))
        assert abs(back[feature, position] - exact(weight)[feature, position]) <= allowed, (feature, position)


def test_weights_that_lie_on_a_grid_are_kept() -> None:
    """A checkpoint that was made from 4-bit codes with offsets has such weights."""
    random = space(torch.float32)
    codes = random.integers(16, 6, 2, 32)
    codes[..., 0], codes[..., 1] = 0, 15
    steps, lowest = random.uniform(6, 2, 1, dtype=torch.float16), random.normal(6, 2, 1, dtype=torch.float16)
    weight = (codes * steps.float() + lowest.float()).view(6, 64)
    made = packed(weight, 4, 32, CodeLayout(4), symmetric=False)
    assert made.offsets is not None
    back = weights(made.codes.numpy(), made.scales.double().numpy(), made.offsets.double().numpy(), 4, 6, 64)
    np.testing.assert_allclose(back, exact(weight), rtol=0, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_packing_in_pieces_is_packing_at_once(bits: int, symmetric: bool) -> None:
    weight = space(torch.float32).normal(50, 48)
    whole = packed(weight, bits, 16, CodeLayout(4), symmetric=symmetric)
    parts = packed(weight, bits, 16, CodeLayout(4), symmetric=symmetric, piece=48 * 12)
    for one, other in zip(whole, parts, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_missing_rows_give_zero() -> None:
    made = packed(space(torch.float32).normal(5, 32), 8, 32, CodeLayout(4), out_features=10, symmetric=False)
    assert made.codes.shape[0] == 3
    out = ops.quantized_linear(torch.ones(1, 32), *made, 8, 10)
    assert out[0, :5].all()
    assert not out[0, 5:].any()


def test_weights_of_zeros_are_zero() -> None:
    made = packed(torch.zeros(4, 32), 4, 32, CodeLayout(4))
    assert not ops.quantized_linear(torch.ones(1, 32), *made, 4, 4).any()


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_scales_beyond_half_precision_are_single(size: float) -> None:
    weight = space(torch.float32).normal(8, 64) * size
    made = packed(weight, 8, 32, CodeLayout(8))
    assert made.scales.dtype == torch.float32
    back = weights(made.codes.numpy(), made.scales.double().numpy(), None, 8, 8, 64)
    np.testing.assert_allclose(back, exact(weight), atol=0.03 * size)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_nan(fault: float) -> None:
    made = packed(space(torch.float32).normal(8, 64), 4, 32, CodeLayout(8))
    x = space(torch.float32, 1).normal(3, 64)
    clean = ops.quantized_linear(x, *made, 4, 8)
    x[1, 40] = fault
    out = ops.quantized_linear(x, *made, 4, 8)
    assert out[1].isnan().all(), "also what the other group contributes"
    assert torch.equal(out[::2], clean[::2])


def test_small_and_large_rows() -> None:
    made = packed(torch.eye(8), 8, 8, CodeLayout(8))
    for size in (1e-38, 1e-29, 1e30):
        x = torch.full((1, 8), size)
        expected = np.zeros((1, 8)) if size < 2.0**-100 else np.full((1, 8), size)
        assert_near(ops.quantized_linear(x, *made, 8, 8), expected, str(size), rtol=0.01, atol=0)


def test_what_does_not_belong_together_is_refused() -> None:
    made = packed(torch.ones(8, 64), 8, 32, CodeLayout(8))
    with pytest.raises(OperatorError, match="belong together"):
        ops.quantized_linear.reference(torch.ones(1, 65), *made, 8, 8)
    with pytest.raises(OperatorError, match="cannot give 9"):
        ops.quantized_linear.reference(torch.ones(1, 64), *made, 8, 9)
    with pytest.raises(OperatorError, match="3 bits"):
        packed(torch.ones(8, 64), 3, 32, 8)
    with pytest.raises(OperatorError, match="group of 12"):
        packed(torch.ones(8, 64), 4, 12, CodeLayout(8))
