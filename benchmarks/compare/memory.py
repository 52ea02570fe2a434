"""Peak memory of a process and all that it starts, and what it consists of.

Proportional set sizes: pages that processes share (a forked engine, mapped weights) count once. Reading them costs time
in the kernel, so memory is measured in runs of its own.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

EVERY = 0.1
LIBRARIES, HEAP, OWN, SHARED, FILES = "libraries", "heap", "other memory of its own", "shared memory", "other files"
PARTS = (LIBRARIES, HEAP, OWN, SHARED, FILES)
"""Programs and libraries with the data they bring; what malloc takes from one end; what is mapped without a file, large
allocations and those of other threads among it; memory files; and mapped files, of weights for example."""
LOOK_AGAIN = 1.01
"""A peak that is higher by less is not taken apart anew: that takes longer than the next one may last."""

Watch = Callable[[subprocess.Popen[bytes], float], int]
_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \S+\s*(.*)")
_MEMORY_FILES = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds, in bytes. Parts add up, and so do processes."""

    pid: int
    name: str
    parts: Mapping[str, int]
    shared: int
    """Of all parts together: its share of what others hold too."""

    @property
    def all(self) -> int:
        return sum(self.parts.values())


class AtPeak:
    """A watch that keeps what the processes held when it was most."""

    def __init__(self) -> None:
        self.held: list[Held] = []

    def __call__(self, process: subprocess.Popen[bytes], seconds: float) -> int:
        return watch(process, seconds, self._look)

    def _look(self, pid: int, held: int) -> None:
        if held > LOOK_AGAIN * sum(one.all for one in self.held):
            self.held = tree_parts(pid)


def tree_pss(pid: int) -> int:
    """Bytes; what ended in between counts as nothing."""
    return sum(_pss(member.pid) for member in _tree(pid))


def tree_parts(pid: int) -> list[Held]:
    """Of every process, the first one first; without those that ended in between."""
    found = [parts(member) for member in _tree(pid)]
    return [held for held in found if held is not None]


def parts(process: psutil.Process) -> Held | None:
    """None: it has ended."""
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
    return Held(process.pid, name, found, max(0, sum(found.values()) - private))


def watch(process: subprocess.Popen[bytes], seconds: float, at_peak: Callable[[int, int], None] | None = None) -> int:
    """The most that was held at once, in bytes, until the process ends. `at_peak` is called whenever it is more than
    before."""
    peak, deadline = 0, time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, seconds)
        held = tree_pss(process.pid)
        if held > peak:
            peak = held
            if at_peak is not None:
                at_peak(process.pid, held)
        time.sleep(EVERY)
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
