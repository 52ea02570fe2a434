"""How many threads a worker on the CPU computes with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_backplane.device import host
from vllm_backplane.devices.cpu import CpuDevice

SET_BY_VLLM = "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(SET_BY_VLLM, raising=False)
    monkeypatch.setattr(host, "usable_cores", lambda: 8)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("option", "variables", "workers", "threads"),
    [
        (None, {}, 1, 8),
        (None, {}, 3, 2),
        (None, {}, 16, 1),
        (None, {"OMP_NUM_THREADS": "5"}, 2, 5),
        (None, {"OMP_NUM_THREADS": "6,2"}, 2, 4),
        (None, {"OMP_NUM_THREADS": "5", SET_BY_VLLM: "1"}, 2, 4),
        (3, {}, 2, 3),
        (3, {"OMP_NUM_THREADS": "5"}, 2, 3),
    ],
)
def test_option_then_variable_then_share_of_the_cores(
    option: int | None,
    variables: dict[str, str],
    workers: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of numbers, for nested regions, is no number: the cores are shared."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(7)
    CpuDevice({"threads": option}).prepare_worker(workers)
    assert torch.get_num_threads() == threads
