"""Tests `embedding`; test_linear.py tests `logits` together with `linear`, which has the same formula."""

from __future__ import annotations

import pytest
import torch
from operator_checks import FLOAT_TYPES, run, same_bits, samples, space

from vllm_backplane import ops


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_rows_are_copied_exactly(dtype: torch.dtype) -> None:
    for sample in samples(ops.embedding, dtype):
        ids, weight = sample.args
        (result,) = run(ops.embedding, sample.args).returned
        assert result.shape == (*ids.shape, weight.shape[1]), sample.label
        rows = result.reshape(-1, weight.shape[1])
        for row, token in zip(rows, ids.flatten().tolist(), strict=True):
            assert same_bits(row, weight[token]), sample.label


def test_part_of_a_wider_table() -> None:
    wide = space(torch.float32).normal(9, 12)
    (result,) = run(ops.embedding, (torch.tensor([8, 0]), wide[:, 4:8])).returned
    assert torch.equal(result, torch.stack([wide[8, 4:8], wide[0, 4:8]]))


def test_ids_outside_the_table_are_an_error() -> None:
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([3]), torch.zeros(3, 2))
