"""Tests the LoRA operators against matrix products per token in numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_backplane import ops

INDICES = [0, 2, -1, 1, 1, -1, 2]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shrink(dtype: torch.dtype) -> None:
    x, a = draw(7, 20, dtype=dtype), draw(3, 4, 20, dtype=dtype, seed=1)
    got = ops.lora_shrink(x, a, torch.tensor(INDICES), 0.25)
    assert got.dtype == torch.float32
    for token, slot in enumerate(INDICES):
        wanted = np.zeros(4) if slot < 0 else 0.25 * a[slot].double().numpy() @ x[token].double().numpy()
        np.testing.assert_allclose(got[token].numpy(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("offset", "size"), [(0, None), (3, 5), (3, 4), (9, None)], ids=str)
@pytest.mark.parametrize("add", [True, False])
def test_expand(dtype: torch.dtype, offset: int, size: int | None, add: bool) -> None:
    y, x, b = draw(7, 12, dtype=dtype), draw(7, 4, seed=1), draw(3, 5, 4, dtype=dtype, seed=2)
    before = y.double().numpy().copy()
    ops.lora_expand(y, x, b, torch.tensor(INDICES), offset, size, add)
    width = min(5, 12 - offset) if size is None else size
    wanted = before.copy()
    for token, slot in enumerate(INDICES):
        change = np.zeros(width) if slot < 0 else b[slot, :width].double().numpy() @ x[token].double().numpy()
        columns = slice(offset, offset + width)
        wanted[token, columns] = change + (before[token, columns] if add else 0)
    np.testing.assert_allclose(y.double().numpy(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    untouched = np.ones(12, dtype=bool)
    untouched[offset : offset + width] = False
    assert np.array_equal(y.double().numpy()[:, untouched], before[:, untouched])


def test_adding_for_tokens_without_adapter_changes_no_bit() -> None:
    y = draw(3, 6, dtype=torch.bfloat16)
    before = y.clone()
    ops.lora_expand(y, draw(3, 2), draw(2, 6, 2, dtype=torch.bfloat16), torch.tensor([-1, -1, -1]))
    assert torch.equal(y, before)


def test_numbers_that_are_no_slot_mean_no_adapter() -> None:
    x, a = draw(3, 8), draw(2, 4, 8, seed=1)
    got = ops.lora_shrink(x, a, torch.tensor([2, 1 << 40, -9]), 1.0)
    assert got.abs().max() == 0


def test_another_adapters_infinities_do_not_leak() -> None:
    a, b = draw(2, 4, 8), draw(2, 6, 4)
    a[1], b[1] = float("inf"), float("nan")
    y, indices = torch.zeros(2, 6), torch.tensor([0, -1])
    narrow = ops.lora_shrink(draw(2, 8), a, indices, 1.0)
    ops.lora_expand(y, narrow, b, indices)
    assert torch.isfinite(narrow).all()
    assert torch.isfinite(y).all()


def test_no_token() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert ops.lora_shrink(torch.empty(0, 8), draw(2, 4, 8), none, 1.0).shape == (0, 4)
    ops.lora_expand(torch.empty(0, 6), torch.empty(0, 4), draw(2, 6, 4), none)
