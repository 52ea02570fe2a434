"""Finds the cores that this process may use: how many, and which physical ones, by NUMA node.

Two hardware threads of one core share its arithmetic units, so a kernel that keeps those units busy gains nothing from
the second thread. Memory belongs to a NUMA node, and the cores of other nodes access it more slowly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from vllm_backplane.host.control_groups import MEMBERSHIP, ROOT, groups_of

_TOPOLOGY = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """Describes a physical core."""

    node: int
    """The NUMA node of the core."""
    cpus: tuple[int, ...]
    """The system's numbers of its hardware threads that this process may use."""


def allowed_cpus() -> frozenset[int]:
    """Returns the hardware threads of this process's affinity, which includes the cpuset of a container."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def control_group_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Returns the CPU quota of the control groups in cores, or None if there is none."""
    granted = []
    for folder, version in groups_of("cpu", root, membership):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except (OSError, ValueError):  # this group does not limit CPU time
            continue
        if quota.isdigit():  # "max" or -1 if there is no limit
            granted.append(int(quota) / int(period))
    return min(granted, default=None)


def usable_cores() -> int:
    """Returns how many cores this process may use, by its affinity and the CPU quota of its container."""
    cores = len(allowed_cpus())
    quota = control_group_cores()
    return max(min(cores, int(quota)), 1) if quota else cores


def physical_cores(allowed: Collection[int], root: Path = _TOPOLOGY) -> tuple[Core, ...]:
    """Returns the cores of the allowed hardware threads, sorted by NUMA node and number.

    If the system does not report its topology, each hardware thread counts as a core, and all are on one node.
    """
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in root.glob("node/node[0-9]*")
        for cpu in _read_cpu_list(folder / "cpulist")
    }
    found: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        siblings = set(_read_cpu_list(root / f"cpu/cpu{cpu}/topology/thread_siblings_list")) | {cpu}
        cpus = tuple(sorted(siblings & set(allowed)))
        found.setdefault(cpus, Core(node_of.get(cpu, 0), cpus))
    return tuple(sorted(found.values(), key=lambda core: (core.node, core.cpus)))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parses Linux's format of a set of numbers, such as 0-3,8,10-11; raises ValueError for other text."""
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise ValueError(f"{part!r} is not a range of numbers")
        numbers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return tuple(dict.fromkeys(numbers))


def _read_cpu_list(file: Path) -> tuple[int, ...]:
    try:
        return parse_cpu_list(file.read_text())
    except (OSError, ValueError):  # some sandboxes show no topology, or one in another format
        return ()
