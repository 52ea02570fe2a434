"""Keeps the fast tests fast: in `make check` a test that starts a process, or connects to another host, fails.

`make check` deselects tests by marker (`slow` in the Makefile). A test without its marker would slow the command
down unnoticed. Python reports every start of a process, and every connection, to audit hooks. The hook in this module
records it for the test that runs at that time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
HELPERS = ("ldconfig", "gcc", "cc", "ld", "objdump", "lscpu", "uname", "file")
"""Programs that Python's and PyTorch's own modules start when they are imported, to find libraries and processors."""

CACHED = "vllm.model_executor.models.registry"
"""Module that vLLM runs in a process to describe a model class. The result is kept for later runs, so that any test may
be the first one that needs it."""

_started: list[str] | None = None
"""Processes and connections that the running test has started; None while no fast test runs."""


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _started is None:
        return
    if event == "socket.connect" and not _is_on_this_host(address := arguments[1]):
        _started.append(f"{event}: {address}")
    elif event in EVENTS:
        program = str(arguments[0]) if arguments else event
        is_cached = event == "subprocess.Popen" and CACHED in map(str, arguments[1] or ())  # type: ignore[call-overload]
        if not is_cached and Path(program.split()[0] if program.split() else program).name not in HELPERS:
            _started.append(f"{event}: {program}")


def _is_on_this_host(address: object) -> bool:
    """Returns whether an address is a path of a Unix socket, or of the loopback interface. Names are no addresses."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    return host in ("localhost", "::1") or host.startswith("127.")


sys.addaudithook(_audit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Records process starts during the test, including those of its fixtures, which are part of its cost."""
    global _started
    deselects_processes = "process" in item.config.getoption("markexpr")
    _started = [] if deselects_processes else None
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        _started = None


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if _started:
        pytest.fail(
            f"this test starts processes or downloads ({'; '.join(sorted(set(_started)))}) without a marker; add "
            "@pytest.mark.process, or the marker that fits (pyproject.toml lists them)",
            pytrace=False,
        )
