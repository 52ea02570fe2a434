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
