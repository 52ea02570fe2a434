"""Measures the peak memory of a process and its descendants, and its parts.

Sizes are proportional set sizes: pages that processes share (a forked engine, mapped weights) count once. Reading them
takes kernel time, so memory is measured in separate runs.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

INTERVAL = 0.1
LIBRARIES, HEAP, OWN, SHARED, FILES = "libraries", "heap", "other memory of its own", "shared memory", "other files"
PARTS = (LIBRARIES, HEAP, OWN, SHARED, FILES)
"""Parts of a process's memory: programs and libraries with their data; the heap of malloc; anonymous mappings, such as
large allocations and those of other threads; memory files; and mapped files, for example of weights."""
SIGNIFICANT = 1.01
"""Growth of the peak from which on it is broken down again. That takes longer than a short peak may last."""

Watcher = Callable[[subprocess.Popen[bytes], float], int]
"""Waits for a process, up to a number of seconds, and returns its peak memory in bytes."""
_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \S+\s*(.*)")
_MEMORY_FILES = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Holds the memory of one process, in bytes. Parts add up, and so do processes."""

    pid: int
    name: str
    parts: Mapping[str, int]
    shared: int
    """The part of the total that is its share of memory used by other processes too."""

    @property
    def all(self) -> int:
        return sum(self.parts.values())


class PeakRecorder:
    """Records the memory of all processes at the peak."""

    def __init__(self) -> None:
        self.processes: list[ProcessMemory] = []

    def __call__(self, process: subprocess.Popen[bytes], seconds: float) -> int:
        return watch(process, seconds, self._record)

    def _record(self, pid: int, size: int) -> None:
        if size > SIGNIFICANT * sum(one.all for one in self.processes):
            self.processes = tree_parts(pid)


def tree_pss(pid: int) -> int:
    """Returns the bytes of a process and its descendants; processes that end meanwhile count as 0."""
    return sum(_pss(member.pid) for member in _tree(pid))


def tree_parts(pid: int) -> list[ProcessMemory]:
    """Returns the memory of a process and its descendants, the process first, without those that end meanwhile."""
    found = [parts(member) for member in _tree(pid)]
    return [one for one in found if one is not None]


def parts(process: psutil.Process) -> ProcessMemory | None:
    """Returns the memory of a process by part, or None if it has ended."""
    try:
        name, lines = process.name(), Path(f"/proc/{process.pid}/smaps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return None
    mappings: list[tuple[str, dict[str, int]]] = []
    programs: set[str] = set()
    for line in lines:
        if header := _HEADER.fullmatch(line):
            rights, path = header.groups()
            mappings.append((path, {}))
            if "x" in rights:
                programs.add(path)
        elif line.endswith(" kB"):
            field, _, value = line.partition(":")
            mappings[-1][1][field] = int(value.split()[0]) * 1024
    found, private = dict.fromkeys(PARTS, 0), 0
    for path, sizes in mappings:
        found[_part(path, programs)] += sizes["Pss"]
        private += sizes["Private_Clean"] + sizes["Private_Dirty"]
    return ProcessMemory(process.pid, name, found, max(0, sum(found.values()) - private))


def watch(process: subprocess.Popen[bytes], seconds: float, at_peak: Callable[[int, int], None] | None = None) -> int:
    """Waits until the process ends and returns its peak memory in bytes. `at_peak` is called at every new peak."""
    peak, deadline = 0, time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, seconds)
        size = tree_pss(process.pid)
        if size > peak:
            peak = size
            if at_peak is not None:
                at_peak(process.pid, size)
        time.sleep(INTERVAL)
    return peak


def _part(path: str, programs: set[str]) -> str:
    if path == "[heap]":
        return HEAP
    if path.startswith(_MEMORY_FILES):
        return SHARED
    if not path or path.startswith("["):
        return OWN
    return LIBRARIES if path in programs or re.search(r"\.so(\.|$)", path) else FILES


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0
