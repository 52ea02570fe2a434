"""Measures the processor time that other programs and other virtual machines take during a measurement."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

BUSY = 0.05
"""Share of processor time of others from which measurements are not reliable."""
STAT = Path("/proc/stat")
_USER, _NICE, _SYSTEM, _IDLE, _WAITING, _IRQ, _SOFT_IRQ, _STEAL = range(8)


class OtherLoad:
    """Compares the processor time of the usable cores with that of this process and its descendants.

    Descendants must be alive from the start until the end of the measurement.
    """

    def __init__(self) -> None:
        self._ticks, self._own = _ticks(), _own_seconds()

    def shares(self) -> tuple[float, float] | None:
        """Returns the shares of processor time since the start of other programs, and of the host of a virtual machine
        (steal time). Returns None where the system does not count them."""
        own = (_own_seconds() - self._own) * os.sysconf("SC_CLK_TCK")
        spent = [now - before for now, before in zip(_ticks(), self._ticks, strict=True)]
        if (total := sum(spent)) <= 0:
            return None
        others = total - spent[_IDLE] - spent[_WAITING] - spent[_STEAL] - own
        return max(0.0, others / total), spent[_STEAL] / total


def _ticks() -> list[int]:
    """Returns the clock ticks that the usable cores have spent so far, by kind."""
    found = [0] * (_STEAL + 1)
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = STAT.read_text().splitlines()
    except OSError:  # some containers hide the file
        return found
    for line in lines:
        name, *values = line.split()
        if name in usable:
            found = [before + int(value) for before, value in zip(found, values, strict=False)]
    return found


def _own_seconds() -> float:
    process = psutil.Process()
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            seconds += times.user + times.system
    return seconds
