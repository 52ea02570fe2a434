"""Runs one fuzz target in a child process on its corpus and on changes of it, and reports every broken rule.

The rules: an input is refused with one of the target's own exceptions, or accepted with a result that the target has
checked: compared with an independent reader where there is one, else with a second run. It ends the process with no
signal, takes at most ten seconds, and needs no more memory than a multiple of its size. The child is watched from
outside, so that a hang in C code is found too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.fuzz.coverage import Coverage
from tests.fuzz.mutations import mutate_bytes

SECONDS = 10.0
"""Seconds that an input may take."""
MOST_FAILURES = 5
"""Failures after which a campaign ends."""
ADDRESS_SPACE = 8 << 30
"""Bytes that the child may map in addition, so that a failure does not take the machine's memory."""
_HEADER = struct.Struct("<QQ")
_INPUT = 1 << 20

Mutate = Callable[[bytes, list[bytes], random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """Describes a parser and what it may do."""

    name: str
    run: Callable[[bytes], Any]
    """Parses an input. Raises one of `clean`, or AssertionError if an accepted result is not the expected one."""
    clean: tuple[type[BaseException], ...]
    """Exceptions that refuse an input."""
    covered: tuple[str, ...]
    """Parts of the paths of the files whose coverage guides the campaign."""
    mutate: Mutate = mutate_bytes
    multiple: int = 64
    """Memory that an input may take, as a multiple of its size (`large_files.py` has inputs for which it counts)…"""
    memory: int = 32 << 20
    """…and in addition."""
    imports: tuple[str, ...] = ()
    """Modules that are imported before the child is forked."""
    prepare: Callable[[], None] = lambda: None
    """Makes what all inputs need, in the child."""


@dataclass(frozen=True)
class Failure:
    """Describes an input that broke a rule."""

    reason: str
    data: bytes


@dataclass
class Report:
    """Holds the outcome of a campaign."""

    accepted: int = 0
    refused: int = 0
    kept: list[bytes] = field(default_factory=list)
    """Changed inputs that reached new lines."""
    lines: set[tuple[str, int]] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return self.accepted + self.refused

    def add(self, other: Report) -> None:
        """Adds the outcome of a child."""
        self.accepted += other.accepted
        self.refused += other.refused
        self.kept += other.kept
        self.lines |= other.lines
        self.failures += other.failures


def campaign(target: Target, corpus: Sequence[bytes], runs: int, seconds: float, seed: int) -> Report:
    """Runs `target` on the corpus and on `runs` changes of it, or until `seconds` have passed.

    After a failure, it continues in a new child with the next input, until there are MOST_FAILURES.
    """
    for name in target.imports:
        importlib.import_module(name)
    whole, position, changed = Report(), 0, 0
    end = time.monotonic() + seconds
    while True:
        work = _Work(target, list(corpus), whole.kept, position, runs - changed, end - time.monotonic(), seed)
        report = _in_child(work)
        whole.add(report)
        replayed = min(report.runs + len(report.failures), len(corpus) - position)
        position += replayed
        changed += report.runs + len(report.failures) - replayed
        done = position >= len(corpus) and (changed >= runs or time.monotonic() >= end)
        if not report.failures or done or len(whole.failures) >= MOST_FAILURES:
            return whole
        seed += 1


@dataclass(frozen=True)
class _Work:
    """Describes the work of one child: the corpus from a position on, and then changes of it and of other inputs."""

    target: Target
    corpus: list[bytes]
    others: list[bytes]
    position: int
    runs: int
    seconds: float
    seed: int


def _in_child(work: _Work) -> Report:
    """Runs a campaign in a forked process until its first failure. The input in work is in shared memory."""
    context = get_context("fork")
    shared = mmap.mmap(-1, _INPUT)
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="backplane-fuzz-") as folder:
        child = context.Process(target=_run, args=(work, shared, sending, folder), daemon=True)
        child.start()
        sending.close()
        try:
            return _watched(child, receiving, shared)
        finally:
            child.kill()
            child.join()


def _watched(child: BaseProcess, receiving: Connection, shared: mmap.mmap) -> Report:
    """Returns the report of a child, or one with the input in work if the child ends or takes too long."""
    number, since = -1, time.monotonic()
    while True:
        if receiving.poll(0.1):
            try:
                report: Report = receiving.recv()
            except EOFError:
                child.join()
                return _ended(_status(child.exitcode), shared)
            return report
        present, _ = _HEADER.unpack_from(shared)
        if present != number:
            number, since = present, time.monotonic()
        # Before the first input, the target is prepared and tried.
        elif time.monotonic() - since > (SECONDS if number else 12 * SECONDS):
            return _ended(f"no result after {SECONDS:g} s", shared)


def _status(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _ended(reason: str, shared: mmap.mmap) -> Report:
    number, size = _HEADER.unpack_from(shared)
    data = shared[_HEADER.size : _HEADER.size + size]
    # The outcomes of the inputs before are not known any more.
    return Report(refused=max(0, number - 1), failures=[Failure(reason, data)])


def _run(work: _Work, shared: mmap.mmap, sending: Connection, folder: str) -> None:
    faulthandler.enable()
    tempfile.tempdir = folder  # it is removed when the child has ended
    target, corpus = work.target, work.corpus
    target.prepare()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + ADDRESS_SPACE, hard))
    if corpus:
        _share(shared, 0, corpus[0])
        with contextlib.suppress(BaseException):  # memory of modules that are imported on first use does not count
            target.run(corpus[0])
    report, reached = Report(), Coverage(target.covered)
    chance, pool = random.Random(work.seed), [*corpus, *work.others]
    end = time.monotonic() + work.seconds
    left = corpus[work.position :]
    for number in range(len(left) + work.runs):
        changed = number >= len(left)
        if changed and time.monotonic() > end:
            break
        data = target.mutate(chance.choice(pool), pool, chance) if changed else left[number]
        _share(shared, number + 1, data)
        before = len(reached.seen)
        reason = _reason(target, data, report, reached)
        if reason is not None:
            report.failures.append(Failure(reason, data))
            break
        if changed and len(reached.seen) > before:
            pool.append(data)
            report.kept.append(data)
    report.lines = reached.lines()
    sending.send(report)
    sending.close()
    sys.stdout.flush()
    os._exit(0)


def _share(shared: mmap.mmap, number: int, data: bytes) -> None:
    """Puts the input in work where the watching process finds it."""
    shared[_HEADER.size : _HEADER.size + len(data)] = data
    _HEADER.pack_into(shared, 0, number, len(data))


def _reason(target: Target, data: bytes, report: Report, reached: Coverage) -> str | None:
    """Runs one input, and returns the rule that it broke."""
    # Otherwise an input could take memory that is free in the heap, without new pages.
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    memory, started = status_bytes("VmRSS"), time.monotonic()
    try:
        with reached:
            target.run(data)
        report.accepted += 1
    except target.clean as refusal:
        if memory_fault := _memory_fault(refusal):
            return f"a refusal that hides {memory_fault}"
        report.refused += 1
    except BaseException as fault:  # of any type: that is the rule
        return f"{type(fault).__name__}: {fault}\n{''.join(traceback.format_tb(fault.__traceback__)[-6:])}"
    took, more = time.monotonic() - started, status_bytes("VmHWM") - memory
    if took > SECONDS:
        return f"took {took:.1f} s"
    allowed = target.multiple * len(data) + target.memory
    return f"took {more:,} bytes of memory for {len(data):,} bytes of input" if more > allowed else None


def _memory_fault(fault: BaseException | None) -> str:
    """Returns the error in the causes of an exception that reports lack of memory, or an empty text."""
    while fault is not None:
        if isinstance(fault, MemoryError) or "allocate memory" in str(fault):
            return f"{type(fault).__name__}: {fault}"
        fault = fault.__cause__ or fault.__context__
    return ""


def reset_peak() -> None:
    """Sets VmHWM to VmRSS."""
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")


def status_bytes(name: str) -> int:
    """Returns a size that the system reports of this process."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")
