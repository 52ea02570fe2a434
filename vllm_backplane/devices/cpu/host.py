"""Memory and cores of the host as this process may use them.

Inside a container the kernel's totals are the machine's; the control group's limit is what the OOM killer goes by.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from vllm_backplane.device import MemoryInfo

_ROOT = Path("/sys/fs/cgroup")


def host_memory() -> MemoryInfo:
    """Total and available memory: the machine's, or the control group's where that is less."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in control_group_limits():
        total = min(total, limit)
        free = min(free, max(limit - used, 0))
    return MemoryInfo(total=total, free=free)


def control_group_limits(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every control group that bounds this process, from its own up to the root."""
    limits = []
    for folder, names in _groups(root, membership):
        limit = _number(folder / names[0])
        used = _number(folder / names[1])
        if limit is None or used is None or limit >= 1 << 60:  # v1 writes a huge number for "no limit"
            continue
        # Page cache counts as used, but the kernel gives it up before it kills anyone.
        limits.append((limit, max(used - _reclaimable(folder), 0)))
    return limits


def control_group_cores(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that the control group grants, if it bounds it (version 2)."""
    granted = []
    for folder, names in _groups(root, membership):
        if names[0] == "memory.max":
            try:
                quota, period = (folder / "cpu.max").read_text().split()
            except (OSError, ValueError):  # the group does not bound time here
                continue
            if quota.isdigit():
                granted.append(int(quota) / int(period))
    return min(granted, default=None)


def _groups(root: Path, membership: Path) -> list[tuple[Path, tuple[str, str]]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no procfs: not Linux, so no control groups either
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.strip("/")
        while True:
            found.append((folder, names))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:  # the group does not bound memory here
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get("inactive_file", values.get("total_inactive_file", 0)))


def own_resident_memory() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def reset_peak() -> None:
    """Let the kernel's high-water mark start again from what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # some sandboxes forbid it; the mark then covers the whole life of the process, which errs high
        return


def own_peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return own_resident_memory()
