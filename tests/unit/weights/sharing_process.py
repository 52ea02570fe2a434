"""Runs a process that shares the weights of a small model, for test_shared_memory.py.

It prints the result of sharing as JSON, and then its memory use for each line that it reads, until its input ends.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_backplane.weights.deduplication import share_weights
from vllm_backplane.weights.sealed_memory import NAME, Segment
from vllm_backplane.weights.shared_registry import WeightsRegistry

WIDTH, LAYERS = 2048, 6
BYTES = LAYERS * WIDTH * WIDTH * 4


def made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).requires_grad_(False)


def memory() -> dict[str, int]:
    """Returns kilobytes of the mappings of shared weights, and of all anonymous memory."""
    listing = Path("/proc/self/smaps").read_text()
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", listing, flags=re.MULTILINE)
    found = {"Rss": 0, "Pss": 0, "Private_Dirty": 0, "anonymous": 0}
    for mapping in mappings:
        values = {name: int(count) for name, count in re.findall(r"^(\w+): +(\d+) kB$", mapping, re.MULTILINE)}
        if NAME in mapping.partition("\n")[0]:
            for name in ("Rss", "Pss", "Private_Dirty"):
                found[name] += values[name]
        found["anonymous"] += values.get("Anonymous", 0)
    return found


def whole() -> int:
    """Returns the proportional share of this process in all memory except files, in kilobytes, as Linux counts it."""
    counted = dict(re.findall(r"^(\w+): +(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE))
    return int(counted["Pss_Anon"]) + int(counted["Pss_Shmem"])


class PeakMemory:
    """Records the peak memory of this process while it moves its weights, measured after every write to a segment."""

    def __init__(self) -> None:
        self.kilobytes = 0
        write = Segment.write

        def measured_write(segment: Segment, offset: int, data: memoryview) -> None:
            write(segment, offset, data)
            shared = os.fstat(segment.descriptor).st_blocks * 512
            self.kilobytes = max(self.kilobytes, memory()["anonymous"] + shared // 1024)

        Segment.write = measured_write  # type: ignore[method-assign]


def measure(model: torch.nn.Module) -> dict[str, Any]:
    result = float(model(torch.ones(1, WIDTH)).double().sum())
    return memory() | {"result": result, "whole": whole()}


if __name__ == "__main__":
    folder, seed = sys.argv[1:]
    bare = whole()
    model = made(int(seed))
    peak, before = PeakMemory(), memory()["anonymous"]
    result = share_weights(model, WeightsRegistry(Path(folder)))
    after = memory()["anonymous"]
    measured = {"bare": bare, "before": before, "after": after, "peak": peak.kilobytes}
    print(json.dumps(asdict(result) | measured), flush=True)
    for line in sys.stdin:
        if line.startswith("write"):
            next(model.parameters()).zero_()
        print(json.dumps(measure(model)), flush=True)
