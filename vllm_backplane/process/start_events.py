"""Reports the steps of a server's start, from whichever process of vLLM takes them.

`vllm-backplane serve` announces a start by an environment variable, which the processes of vLLM inherit, forked or
spawned. A step is then logged in one line, and sent to the display on the terminal if there is one. Without the
variable, as under `vllm serve` and `vllm.LLM`, nothing is reported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import time
from dataclasses import asdict, dataclass
from functools import cache

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only

VARIABLE = "_BACKPLANE_START"
STOPPING, END, RELEASE = "stopping", "end", "release"
"""Steps that only the display gets: they are no part of a start, and a signal handler may report them."""
LONGEST_EVENT = 4000
"""Bytes of an event. The kernel does not mix the bytes of several processes if each writes fewer than 4096 at once."""

Fact = str | int | float | bool | None
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Start:
    """Describes the start of a server for its processes."""

    began: float
    """Seconds of the monotonic clock, which all processes of the host share."""
    pipe: str = ""
    """Path of the named pipe that the display reads, or an empty text if there is none."""
    filters: bool = False
    """Whether log lines that do not concern the user are left out."""


def announce(start: Start) -> None:
    """Makes this process, and those that it starts later, report the steps of the start."""
    os.environ[VARIABLE] = json.dumps(asdict(start))


def announced() -> Start | None:
    """Returns the start that was announced to this process, or None."""
    found = os.environ.get(VARIABLE)
    return None if not found else _parsed(found)


@cache
def _parsed(text: str) -> Start:
    return Start(**json.loads(text))


def report(step: str, **facts: Fact) -> None:
    """Reports that a step has been completed. Facts that are None are left out."""
    start = announced()
    if start is None:
        return
    given: dict[str, Fact] = {name: fact for name, fact in facts.items() if fact is not None}
    event: dict[str, Fact] = {"step": step, "at": round(time.monotonic() - start.began, 2), **given}
    if step not in (STOPPING, END, RELEASE):
        _log(structured(event))
    if start.pipe:
        _send(event, start.pipe)


def report_stopping() -> None:
    """Reports that a signal stops the server. In a child of the server, it ends only that child."""
    if multiprocessing.parent_process() is None:
        report(STOPPING)


_unlogged: list[str] = []
"""Lines from the time before vLLM has configured its loggers."""


def _log(line: str) -> None:
    _unlogged.append(line)
    if logger.hasHandlers():
        for waiting in _unlogged:
            logger.info("Start: %s", waiting)
        _unlogged.clear()


def structured(event: dict[str, Fact]) -> str:
    """Returns an event as key=value pairs. A text with other characters than those of names and paths is in quotes,
    with its control characters escaped."""
    return " ".join(f"{name}={_value(fact)}" for name, fact in event.items())


def _value(fact: Fact) -> str:
    return fact if isinstance(fact, str) and _PLAIN.fullmatch(fact) else json.dumps(fact)


def _send(event: dict[str, Fact], pipe: str) -> None:
    line = json.dumps(event).encode() + b"\n"
    if len(line) > LONGEST_EVENT:
        cut = LONGEST_EVENT // (6 * len(event))  # JSON has up to six bytes for a character
        line = json.dumps({k: v[:cut] if isinstance(v, str) else v for k, v in event.items()}).encode() + b"\n"
    # A display that has ended, or that does not read, must not disturb the server.
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
