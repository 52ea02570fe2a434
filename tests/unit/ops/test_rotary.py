"""Tests the rotary embedding operator against multiplication by complex numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operator_checks import FLOAT_TYPES, assert_near, exact, private, run, samples, space

from vllm_backplane import ops
from vllm_backplane.errors import OperatorError

# Each product is rounded before the difference, so the error is relative to the operands, not to the result.
ABSOLUTE = {torch.float32: 1e-6, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def rotated(positions: np.ndarray, x: np.ndarray, table: np.ndarray, head_size: int, neox: bool) -> np.ndarray:
    """Returns the rotation, computed with each pair of dimensions as a complex number times exp(i * angle)."""
    half = table.shape[-1] // 2
    out = x.copy().reshape(positions.size, -1, head_size)
    for token, position in enumerate(positions.flatten().astype(int)):
        turn = table[position, :half] + 1j * table[position, half:]
        for head in out[token]:
            first, second = (
                (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
            )
            turned = (head[first] + 1j * head[second]) * turn
            head[first], head[second] = turned.real, turned.imag
    return out.reshape(x.shape)


def angles(positions: int, rotary_dim: int, dtype: torch.dtype) -> torch.Tensor:
    steps = np.arange(positions)[:, None] / 10000 ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.from_numpy(np.concatenate([np.cos(steps), np.sin(steps)], -1)).to(dtype)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_over_samples(dtype: torch.dtype) -> None:
    for sample in samples(ops.rotary_embedding, dtype):
        positions, query, key, table, head_size, neox = sample.args
        after = run(ops.rotary_embedding, sample.args).args
        for before, actual in ((query, after[1]), (key, after[2])):
            if before is None or before.numel() == 0:
                continue
            expected = rotated(exact(positions), exact(before), exact(table), head_size, neox)
            assert_near(actual, expected, sample.label, atol=ABSOLUTE[dtype])


@pytest.mark.parametrize("neox", [True, False])
def test_a_fused_projection_keeps_its_values(neox: bool) -> None:
    fused = space(torch.float32).normal(5, (4 + 2 + 2) * 8)
    original = fused.clone()
    table = angles(32, 6, torch.float32)
    positions = torch.tensor([0, 3, 31, 7, 7])
    ops.rotary_embedding(positions, fused[:, :32], fused[:, 32:48], table, 8, neox)
    expected = rotated(positions.numpy(), exact(original[:, :48]), exact(table), 8, neox)
    assert_near(fused[:, :48], expected, "query and key")
    assert torch.equal(fused[:, 48:], original[:, 48:])
    untouched = fused[:, :48].view(5, 6, 8)[..., 6:]
    assert torch.equal(untouched, original[:, :48].view(5, 6, 8)[..., 6:])


@pytest.mark.parametrize("neox", [True, False])
def test_scores_depend_on_distance_alone(neox: bool) -> None:
    """The purpose of the embedding is that q(m) . k(n) is a function of m - n."""
    table = angles(64, 16, torch.float32)
    source = space(torch.float32)
    query, key = source.normal(1, 16), source.normal(1, 16)

    def score(at: int, other: int) -> float:
        q, k = query.clone(), key.clone()
        ops.rotary_embedding(torch.tensor([at]), q, None, table, 16, neox)
        ops.rotary_embedding(torch.tensor([other]), k, None, table, 16, neox)
        return float(q @ k.T)

    assert score(5, 2) == pytest.approx(score(45, 42), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 4), abs=1e-3)


def test_position_zero_is_the_identity() -> None:
    query = space(torch.float32).normal(2, 16)
    before = query.clone()
    ops.rotary_embedding(torch.zeros(2, dtype=torch.int64), query, None, angles(4, 16, torch.float32), 16, True)
    assert torch.equal(query, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_table_rounds_once(dtype: torch.dtype) -> None:
    query, table, positions = space(dtype).normal(9, 32), angles(64, 32, torch.float32), torch.arange(3, 12)
    expected = rotated(positions.numpy(), exact(query), exact(table), 32, True)
    ops.rotary_embedding(positions, query, None, table, 32, True)
    assert_near(query, expected, "one rounding", rtol=torch.finfo(dtype).eps / 2, atol=1e-6)


def test_query_and_key_may_have_different_numbers_of_heads_and_shapes() -> None:
    source = space(torch.float32)
    positions, query, key = torch.tensor([4, 9]), source.normal(2, 6, 8), source.normal(2, 8)
    table = angles(16, 8, torch.float32)
    args = (positions, query, key, table, 8, False)
    after = run(ops.rotary_embedding, args).args
    assert_near(after[1], rotated(positions.numpy(), exact(query), exact(table), 8, False), "query")
    assert_near(after[2], rotated(positions.numpy(), exact(key), exact(table), 8, False), "key")


def test_compiled_with_slices_of_one_tensor() -> None:
    """Functionalization must write both slices back into the tensor that they are slices of."""

    def layer(positions: torch.Tensor, fused: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        fused = fused * 2
        query, key, value = fused.split([32, 16, 16], -1)
        ops.rotary_embedding(positions, query, key, table, 8, True)
        return query.sum(-1) + key.sum(-1) + value.sum(-1)

    args = (torch.arange(3), space(torch.float32).normal(3, 64), angles(16, 8, torch.float32))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*private(args)), layer(*private(args)))


@pytest.mark.parametrize(
    ("query_width", "head_size", "columns"),
    [(32, 8, 12), (32, 8, 7), (30, 8, 8)],
    ids=["wide", "odd", "ragged"],
)
def test_sizes_that_do_not_fit_are_refused(query_width: int, head_size: int, columns: int) -> None:
    with pytest.raises(OperatorError):
        ops.rotary_embedding.reference(
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, query_width),
            None,
            torch.zeros(4, columns),
            head_size,
            True,
        )
