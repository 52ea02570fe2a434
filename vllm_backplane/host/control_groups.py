"""Finds the control groups (cgroups) of this process, by which a container limits its memory and CPU time."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_of(controller: str, root: Path, membership: Path) -> list[tuple[Path, int]]:
    """Returns (folder, cgroup version) of this process's groups under a controller, from its own up to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no procfs: not Linux, so no control groups either
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base, version = (root / controller, 1) if controllers else (root, 2)
        folder = base / path.strip("/")
        while True:
            found.append((folder, version))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return found


def control_group_limits(root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[tuple[int, int]]:
    """Returns (limit, used) in bytes of every control group that limits this process, from its own up to the root."""
    limits = []
    for folder, version in groups_of("memory", root, membership):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(folder / name) for name in names)
        if limit is None or used is None or limit >= 1 << 60:  # v1 writes a huge number for "no limit"
            continue
        # Page cache counts as used, but the kernel reclaims it before it kills a process.
        limits.append((limit, max(used - _reclaimable(folder), 0)))
    return limits


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:  # this group does not limit memory
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    """Returns the bytes of a group's inactive page cache."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get("inactive_file", values.get("total_inactive_file", 0)))
