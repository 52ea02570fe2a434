"""Times functions in turns, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from vllm_backplane.devices.cpu.graphs import CpuGraph

Call = Callable[[], Any]


def medians(calls: dict[str, Call], rounds: int, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Returns the median seconds per call of each function. `seconds` is the total time for one function."""
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
    """Returns a function that replays `count` calls from a captured graph, without Python between them."""
    graph = CpuGraph()
    with torch.inference_mode(), graph.capture():
        for _ in range(count):
            call()
    return graph.replay
