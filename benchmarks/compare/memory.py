"""Peak memory of a process and all that it starts.

Proportional set sizes: pages that processes share (a forked engine, mapped weights) count once. Reading them costs time
in the kernel, so memory is measured in runs of its own.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil

EVERY = 0.1


def tree_pss(pid: int) -> int:
    """Bytes; what ended in between counts as nothing."""
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_pss(member.pid) for member in members)


def watch(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The most that was held at once, in bytes, until the process ends."""
    peak, deadline = 0, time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, seconds)
        peak = max(peak, tree_pss(process.pid))
        time.sleep(EVERY)
    return peak


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0
