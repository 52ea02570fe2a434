"""Weights on large pages: found by their addresses, moved without a change, and left alone where there are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from vllm_backplane.devices.cpu import huge_pages
from vllm_backplane.devices.cpu.device import CpuDevice

MEGABYTE = 1 << 20


def on_large_pages(address: int) -> int:
    """Bytes of large pages in the mapping that holds an address, as the system counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        borders = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if borders:
            inside = int(borders[1], 16) <= address < int(borders[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def test_a_stretch_is_named_once_however_many_weights_it_holds() -> None:
    memory = torch.zeros(8 * MEGABYTE, dtype=torch.uint8)
    size, begin = 2 * MEGABYTE, memory.data_ptr()
    # A view brings all of the storage that it is a part of.
    found = huge_pages.stretches([memory[:100], memory[5:7], torch.empty(0)], size)
    assert all(place % size == 0 and place < begin + memory.nbytes and place + size > begin for place in found)
    assert len(set(found)) == len(found) == found[-1] // size - found[0] // size + 1
    assert found[0] <= begin and found[-1] + size >= begin + memory.nbytes


def test_weights_are_the_same_on_large_pages() -> None:
    size = huge_pages.page_size()
    if size == 0 or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system gives no large pages")
    weights = [torch.randint(256, (700 * 1024,), dtype=torch.uint8) for _ in range(40)]
    copies, addresses = [weight.clone() for weight in weights], [weight.data_ptr() for weight in weights]
    CpuDevice().settle_weights(weights)
    assert [weight.data_ptr() for weight in weights] == addresses
    assert all(torch.equal(weight, copy) for weight, copy in zip(weights, copies, strict=True))
    moved = huge_pages.gather(weights)
    if moved == 0:
        pytest.skip("this system gathers large pages by itself, later")
    assert moved % size == 0
    assert max(on_large_pages(address) for address in addresses) >= size


def test_nothing_is_moved_where_the_system_has_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SIZE_FILE", Path("/nonexistent"))
    assert huge_pages.gather([torch.zeros(MEGABYTE)]) == 0
