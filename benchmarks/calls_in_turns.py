"""Functions that are measured beside each other: in turns, so that what else happens on the machine hits all."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from vllm_backplane.devices.cpu.graphs import CpuGraph

Call = Callable[[], Any]


def medians(calls: dict[str, Call], rounds: int, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds per call."""
    counts = {}
    for name, call in calls.items():
        call()
        began = clock()
        call()
        counts[name] = max(1, int(seconds / rounds / max(1e-6, clock() - began)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = clock()
            for _ in range(counts[name]):
                call()
            times[name].append((clock() - began) / counts[name])
    return {name: statistics.median(values) for name, values in times.items()}


def replayed(call: Call, count: int) -> Call:
    """So many calls one after another without Python, as in a decode step of the cpu device."""
    graph = CpuGraph()
    with torch.inference_mode(), graph.capture():
        for _ in range(count):
            call()
    return graph.replay
