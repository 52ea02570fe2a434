"""Tests copies of host memory between raw addresses."""

from __future__ import annotations

import ctypes

import pytest
import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.runner.raw_memory import copy_host_memory


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def addresses(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint64)


def test_copying_host_memory() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    copy_host_memory(
        addresses(source.data_ptr() + 3, source.data_ptr() + 50),
        addresses(target.data_ptr() + 10, target.data_ptr()),
        ints([20, 1]),
    )
    wanted = [0] * 100
    wanted[10:30] = range(3, 23)
    wanted[0] = 50
    assert target.tolist() == wanted


@pytest.mark.parametrize("shift", [-3, 3])
def test_copying_overlapping_host_memory(shift: int) -> None:
    memory = torch.arange(50, dtype=torch.uint8)
    start = memory.data_ptr() + 10
    copy_host_memory(addresses(start), addresses(start + shift), ints([30]))
    assert memory.tolist()[10 + shift : 40 + shift] == list(range(10, 40))


def test_copying_nothing() -> None:
    copy_host_memory(addresses(), addresses(), ints([]))
    copy_host_memory(addresses(ctypes.addressof(ctypes.c_char())), addresses(0), ints([0]))


def test_addresses_of_a_device_are_refused() -> None:
    elsewhere = torch.empty(1, dtype=torch.uint64, device="meta")
    with pytest.raises(OperatorError, match="no-enable-prefix-caching"):
        copy_host_memory(elsewhere, elsewhere, torch.empty(1, dtype=torch.int32, device="meta"))
