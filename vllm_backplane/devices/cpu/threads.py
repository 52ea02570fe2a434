"""Decides how many threads a worker computes with and which cores it is bound to.

By default a worker gets its share of the physical cores: the second hardware thread of a core adds nothing to kernels
that keep the core's arithmetic units busy. A machine with a single core, the smallest of a cloud, is the exception: its
second thread reads memory while the first one waits for memory. If a share is large, one core is left free for the
other processes of the server. Without it, one thread of the worker would share its core with those processes, and all
other threads of a step would wait for that one. Workers are bound to cores of their own on a machine with several NUMA
nodes. On a single node, binding would only prevent the system from moving a thread to an idle core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_backplane.errors import OptionError
from vllm_backplane.host.cores import Core, allowed_cpus, parse_cpu_list, physical_cores, usable_cores

AUTO, OFF = "auto", "off"
MANY_CORES = 8
"""Share of a worker, in cores, from which one core is left free; of a smaller share, a whole core would be too much."""

Binding = str | tuple[int, ...]
"""The value of the option ``bind``: AUTO, OFF, or the system's numbers of hardware threads."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Describes the part of the host that this process may use."""

    cores: tuple[Core, ...]
    threads: int
    """Number of threads that may run at once: every hardware thread counts, and the container's CPU quota applies."""

    @property
    def cpus(self) -> frozenset[int]:
        """Returns the numbers of all hardware threads."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def units(self) -> int:
        """Returns how many threads compute at once without slowing each other down."""
        return len(self.cores if len(self.cores) > 1 else self.cpus)

    @property
    def has_quota(self) -> bool:
        """Returns whether a CPU quota limits this process. Then other processes share its cores, and it cannot find out
        which cores are idle."""
        return self.threads < len(self.cpus)


@dataclass(frozen=True, slots=True)
class Share:
    """Describes the threads and cores of one worker."""

    threads: int
    cpus: frozenset[int] | None
    """The hardware threads that the worker is bound to; None if it is not bound."""


def this_machine() -> Machine:
    """Returns the cores and threads that this process may use."""
    return Machine(physical_cores(allowed_cpus()), usable_cores())


def binding(value: Any) -> Binding:
    """Parses the value of the option ``bind``."""
    expected = f"{AUTO}, {OFF}, or cores as the system numbers them, such as 0-7,16-23"
    if value in (AUTO, OFF):
        return str(value)
    try:
        cpus = parse_cpu_list(value if isinstance(value, str) else ",".join(map(str, value)))
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    if not cpus:
        raise ValueError(expected)
    return cpus


def omp_num_threads() -> int | None:
    """Returns OMP_NUM_THREADS if the user set it, else None. vLLM sets it as well, and marks that by a variable."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) or None if value.isdigit() and "VLLM_OMP_NUM_THREADS_SET_BY_VLLM" not in os.environ else None


def faults(machine: Machine, option: int | None, bound: Binding) -> tuple[tuple[str, str], ...]:
    """Returns (problem, remedy) pairs of settings that request more threads or other cores than the machine has."""
    found = []
    requested = (("cpu.threads", option), ("OMP_NUM_THREADS", None if option else omp_num_threads()))
    for name, threads in requested:
        if threads is not None and threads > machine.threads:
            limits = "by its affinity and the quota of its control group"
            problem = f"{name} is {threads}, and this process may use {_count_of_cores(machine.threads)} ({limits})"
            found.append((problem, f"set at most {machine.threads}, or leave {name} out"))
    if not isinstance(bound, str) and (missing := sorted(set(bound) - machine.cpus)):
        found.append(
            (
                f"cpu.bind names {_count_of_cores(len(missing))} that this process may not use: {_cpu_list(missing)}",
                f"choose from {_cpu_list(sorted(machine.cpus))}",
            )
        )
    return tuple(found)


def refuse_too_many_threads(machine: Machine, workers: int, option: int | None, bound: Binding) -> None:
    """Raises an OptionError if the workers would have more threads than there are cores, or no bound core each. One
    thread each is always allowed."""
    available = _available_threads(machine, bound)
    if option is not None and option > 1 and option * workers > available:
        raise OptionError(
            f"cpu.threads is {option} for each of {workers} workers on this host, which may use "
            f"{_count_of_cores(available)} together; set at most {max(available // workers, 1)}, or start fewer workers"
        )
    if not isinstance(bound, str) and len(bound) < workers:
        raise OptionError(
            f"cpu.bind names {_count_of_cores(len(bound))} for {workers} workers on this host; name at least one for "
            "each, or start fewer workers"
        )


def share(machine: Machine, index: int, workers: int, option: int | None, bound: Binding) -> Share:
    """Returns the threads and cores of the `index`-th of the workers on this host."""
    refuse_too_many_threads(machine, workers, option, bound)
    available = _available_threads(machine, bound)
    if isinstance(bound, str):
        cores, units = machine.cores, min(machine.units, available)
        if units // workers >= MANY_CORES:
            units -= 1
    else:
        cores, units = _named_cores(machine, bound), available
    # Every process inherits OMP_NUM_THREADS, which is often set without regard to several workers. So it is only an
    # upper bound for each worker.
    variable = omp_num_threads()
    threads = option or max(min(variable, available // workers) if variable else units // workers, 1)
    if bound == OFF or (bound == AUTO and not _should_bind(machine, workers)):
        return Share(threads, None)
    own = _slice(cores, index % workers, workers)
    return Share(threads, frozenset(cpu for core in own for cpu in core.cpus))


def bind(cpus: frozenset[int]) -> None:
    """Binds every thread of this process; threads that start later inherit the binding."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
        except ProcessLookupError:  # the thread has ended in the meantime
            continue
        except OSError as refused:
            raise OptionError(
                f"the system does not let this process bind itself to cores {_cpu_list(sorted(cpus))} ({refused}); set "
                f"cpu.bind to {OFF}"
            ) from refused


def _available_threads(machine: Machine, bound: Binding) -> int:
    """Returns how many threads all workers of the host may have together."""
    return machine.threads if isinstance(bound, str) else min(machine.threads, len(bound))


def _should_bind(machine: Machine, workers: int) -> bool:
    """Returns whether AUTO binds: there are several workers, several NUMA nodes and no CPU quota."""
    nodes = {core.node for core in machine.cores}
    return 1 < workers <= len(machine.cores) and len(nodes) > 1 and not machine.has_quota


def _named_cores(machine: Machine, cpus: Sequence[int]) -> tuple[Core, ...]:
    """Returns each hardware thread that the user named as a core of its own, in the user's order."""
    node_of = {cpu: core.node for core in machine.cores for cpu in core.cpus}
    return tuple(Core(node_of[cpu], (cpu,)) for cpu in cpus)


def _slice(cores: tuple[Core, ...], index: int, workers: int) -> tuple[Core, ...]:
    """Returns a worker's cores: consecutive ones, and of one NUMA node if the workers divide evenly among nodes."""
    nodes = [tuple(group) for _, group in groupby(cores, key=lambda core: core.node)]
    if len({len(node) for node in nodes}) == 1 and workers % len(nodes) == 0:
        per_node = workers // len(nodes)
        cores, index, workers = nodes[index // per_node], index % per_node, per_node
    each = len(cores) // workers
    return cores[index * each : (index + 1) * each]


def _count_of_cores(count: int) -> str:
    return f"{count} core" if count == 1 else f"{count} cores"


def _cpu_list(cpus: Sequence[int]) -> str:
    """Returns the numbers in Linux's format, such as 0-3,8."""
    parts = []
    for _, run in groupby(enumerate(cpus), key=lambda pair: pair[1] - pair[0]):
        numbers = [cpu for _, cpu in run]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(parts)
