"""How many threads a worker computes with, and on which cores.

Without being told, a worker takes its share of the physical cores: the second hardware thread of a core adds nothing to
kernels that keep its arithmetic busy. A single core is the exception, as the smallest machines of clouds have it: its
second thread reads memory while the first one waits for it. Where there are many, one is left to the processes around
the workers, for which all threads of a step would otherwise wait. Workers are bound to cores of their own where the
machine has several nodes of memory; on a single node that would only keep the system from moving them to where nothing
runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_backplane.device import host
from vllm_backplane.device.cores import Core, allowed_cpus, parse_list, physical_cores
from vllm_backplane.errors import OptionError

AUTO, OFF = "auto", "off"
MANY_CORES = 8
"""Where a worker's share is so large, one core is kept free: of less, a thread would be too much to give."""

Binding = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use of the host."""

    cores: tuple[Core, ...]
    threads: int
    """That may run at once, hardware threads of one core counted each, a container's quota kept to."""

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def units(self) -> int:
        """Threads that compute at once without being in each other's way."""
        return len(self.cores if len(self.cores) > 1 else self.cpus)

    @property
    def is_rationed(self) -> bool:
        """By a quota of time rather than a set of cores: others share those cores, and nobody says which are idle."""
        return self.threads < len(self.cpus)


@dataclass(frozen=True, slots=True)
class Share:
    threads: int
    cpus: frozenset[int] | None
    """Those the worker is bound to; None: it runs wherever the system puts it."""


def machine() -> Machine:
    return Machine(physical_cores(allowed_cpus()), host.usable_cores())


def binding(value: Any) -> Binding:
    """Parses the option."""
    expected = f"{AUTO}, {OFF}, or cores as the system numbers them, such as 0-7,16-23"
    if value in (AUTO, OFF):
        return str(value)
    try:
        cpus = parse_list(value if isinstance(value, str) else ",".join(map(str, value)))
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    if not cpus:
        raise ValueError(expected)
    return cpus


def stated_threads() -> int | None:
    """OMP_NUM_THREADS as the user set it; vLLM sets it too, and then says so."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) or None if stated.isdigit() and "VLLM_OMP_NUM_THREADS_SET_BY_VLLM" not in os.environ else None


def faults(have: Machine, option: int | None, bound: Binding) -> tuple[tuple[str, str], ...]:
    """(what is wrong, remedy) pairs: what is asked for and is not there."""
    found = []
    stated = (("cpu.threads", option), ("OMP_NUM_THREADS", None if option else stated_threads()))
    for name, threads in stated:
        if threads is not None and threads > have.threads:
            limits = "its affinity, and the quota of its control group"
            what = f"{name} is {threads}, and this process may use {_cores(have.threads)} ({limits})"
            found.append((what, f"state at most {have.threads}, or leave {name} out"))
    if not isinstance(bound, str) and (missing := sorted(set(bound) - have.cpus)):
        found.append(
            (
                f"cpu.bind names {_cores(len(missing))} that this process may not use: {_numbers(missing)}",
                f"choose from {_numbers(sorted(have.cpus))}",
            )
        )
    return tuple(found)


def refuse(have: Machine, workers: int, option: int | None, bound: Binding) -> None:
    """Settings that so many workers on one host cannot have. One thread each they always can."""
    room = _room(have, bound)
    if option is not None and option > 1 and option * workers > room:
        raise OptionError(
            f"cpu.threads is {option} for each of {workers} workers on this host, which may use {_cores(room)} "
            f"together; state at most {max(room // workers, 1)}, or start fewer workers"
        )
    if not isinstance(bound, str) and len(bound) < workers:
        raise OptionError(
            f"cpu.bind names {_cores(len(bound))} for {workers} workers on this host; name at least one for each, or "
            "start fewer workers"
        )


def share(have: Machine, index: int, workers: int, option: int | None, bound: Binding) -> Share:
    """Of the worker of this number among those of the host."""
    refuse(have, workers, option, bound)
    room = _room(have, bound)
    if isinstance(bound, str):
        cores, units = have.cores, min(have.units, room)
        if units // workers >= MANY_CORES:
            units -= 1
    else:
        cores, units = _stated_cores(have, bound), room
    # Every process inherits the variable, also from places that know nothing of several workers: it is the most that a
    # worker takes.
    variable = stated_threads()
    threads = option or max(min(variable, room // workers) if variable else units // workers, 1)
    if bound == OFF or (bound == AUTO and not _gains_by_binding(have, workers)):
        return Share(threads, None)
    own = _slice(cores, index % workers, workers)
    return Share(threads, frozenset(cpu for core in own for cpu in core.cpus))


def bind(cpus: frozenset[int]) -> None:
    """Every thread of this process, those that it will start included."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
        except ProcessLookupError:  # it has ended since
            continue
        except OSError as refused:
            raise OptionError(
                f"the system does not let this process bind itself to cores {_numbers(sorted(cpus))} ({refused}); set "
                f"cpu.bind to {OFF}"
            ) from refused


def _room(have: Machine, bound: Binding) -> int:
    """Threads that all workers of the host may have together."""
    return have.threads if isinstance(bound, str) else min(have.threads, len(bound))


def _gains_by_binding(have: Machine, workers: int) -> bool:
    nodes = {core.node for core in have.cores}
    return 1 < workers <= len(have.cores) and len(nodes) > 1 and not have.is_rationed


def _stated_cores(have: Machine, stated: Sequence[int]) -> tuple[Core, ...]:
    """The hardware threads that were named, each for itself, in the order of the list: its author knows the machine."""
    node_of = {cpu: core.node for core in have.cores for cpu in core.cpus}
    return tuple(Core(node_of[cpu], (cpu,)) for cpu in stated)


def _slice(cores: tuple[Core, ...], index: int, workers: int) -> tuple[Core, ...]:
    """A worker's cores: neighbours, and of one node where workers can be dealt out to nodes evenly."""
    nodes = [tuple(group) for _, group in groupby(cores, key=lambda core: core.node)]
    if len({len(node) for node in nodes}) == 1 and workers % len(nodes) == 0:
        per_node = workers // len(nodes)
        cores, index, workers = nodes[index // per_node], index % per_node, per_node
    each = len(cores) // workers
    return cores[index * each : (index + 1) * each]


def _cores(count: int) -> str:
    return f"{count} core" if count == 1 else f"{count} cores"


def _numbers(cpus: Sequence[int]) -> str:
    """As the system writes them: 0-3,8."""
    parts = []
    for _, run in groupby(enumerate(cpus), key=lambda pair: pair[1] - pair[0]):
        numbers = [cpu for _, cpu in run]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(parts)
