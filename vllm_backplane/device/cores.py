"""The cores that this process may use, as the machine has them: physical ones, node by node.

Two hardware threads of one core share its units for arithmetic, so kernels that keep those busy gain nothing from the
second. Memory belongs to a node of cores, and is slower for the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    node: int
    cpus: tuple[int, ...]
    """The system's numbers of its hardware threads, those that this process may use."""


def allowed_cpus() -> frozenset[int]:
    """The hardware threads that this process may run on: its affinity, which a container's set of cores is part of."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(allowed: Collection[int], root: Path = _ROOT) -> tuple[Core, ...]:
    """Node by node, each in the order of its numbers. Where the system does not say how its hardware threads belong
    together, each is a core, and all are of one node."""
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in root.glob("node/node[0-9]*")
        for cpu in _listed(folder / "cpulist")
    }
    found: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        siblings = set(_listed(root / f"cpu/cpu{cpu}/topology/thread_siblings_list")) | {cpu}
        cpus = tuple(sorted(siblings & set(allowed)))
        found.setdefault(cpus, Core(node_of.get(cpu, 0), cpus))
    return tuple(sorted(found.values(), key=lambda core: (core.node, core.cpus)))


def parse_list(text: str) -> tuple[int, ...]:
    """The system's way to write a set of numbers: 0-3,8,10-11. ValueError where it is something else."""
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise ValueError(f"{part!r} is no range of numbers")
        numbers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return tuple(dict.fromkeys(numbers))


def _listed(file: Path) -> tuple[int, ...]:
    try:
        return parse_list(file.read_text())
    except (OSError, ValueError):  # some sandboxes show no topology, or one of their own making
        return ()
