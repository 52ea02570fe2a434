"""A process with a small model whose weights it shares, for test_shared_memory.py: tells what came of it as JSON, then
what its memory looks like for each line that it is sent, until there are no more."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_backplane.weights.deduplication import share
from vllm_backplane.weights.sealed_memory import NAME, Segment
from vllm_backplane.weights.shared_registry import Board

WIDTH, LAYERS = 2048, 6
BYTES = LAYERS * WIDTH * WIDTH * 4


def made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).requires_grad_(False)


def memory() -> dict[str, int]:
    """Kilobytes of the mappings of shared weights, and of all anonymous memory."""
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
    """Kilobytes that are this process's part of all memory but that of files, by the system's own account."""
    counted = dict(re.findall(r"^(\w+): +(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE))
    return int(counted["Pss_Anon"]) + int(counted["Pss_Shmem"])


class Watched:
    """What a process has in memory while it moves its weights, whenever some have been written."""

    def __init__(self) -> None:
        self.most = 0
        write = Segment.write

        def watched(segment: Segment, place: int, data: memoryview) -> None:
            write(segment, place, data)
            shared = os.fstat(segment.handle).st_blocks * 512
            self.most = max(self.most, memory()["anonymous"] + shared // 1024)

        Segment.write = watched  # type: ignore[method-assign]


def answer(model: torch.nn.Module) -> dict[str, Any]:
    result = float(model(torch.ones(1, WIDTH)).double().sum())
    return memory() | {"result": result, "whole": whole()}


if __name__ == "__main__":
    folder, seed = sys.argv[1:]
    bare = whole()
    model = made(int(seed))
    watched, before = Watched(), memory()["anonymous"]
    outcome = share(model, Board(Path(folder)))
    after = memory()["anonymous"]
    told = {"bare": bare, "before": before, "after": after, "most": watched.most}
    print(json.dumps(asdict(outcome) | told), flush=True)
    for line in sys.stdin:
        if line.startswith("write"):
            next(model.parameters()).zero_()
        print(json.dumps(answer(model)), flush=True)
