"""Tests how servers end: with an error if a worker dies, without delay on Ctrl-C, and with no process left."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ending_servers import (
    HANG_SECONDS,
    TWO_WORKERS,
    Request,
    Starter,
    Stream,
    connections,
    processes_titled,
    socket_files,
    title,
    wait_for_exit,
)
from processes import Child
from server import COMMAND, VLLM

from tests.ports import free_port

pytestmark = [pytest.mark.server, pytest.mark.models]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a request in flight"])
def test_a_killed_worker_ends_the_server(start: Starter, busy: bool) -> None:
    server = start(*TWO_WORKERS)
    workers = processes_titled(server, "Worker")
    assert len(workers) == 2, [title(process) for process in server.descendants()]
    request = Request(server) if busy else None
    server.descendants()
    workers[-1].send_signal(signal.SIGKILL)
    status = wait_for_exit(server)
    assert status != 0, "the exit status must report the failure"
    log = server.text().lower()
    assert re.search(r"worker.* died", log), "the log must report the death of the worker"
    assert "the server exits because its engine died" in log, "no other error may end the server"
    if request is not None:
        request.must_have_failed()


@pytest.mark.parametrize("processes", [(), TWO_WORKERS], ids=["one process", "two workers"])
def test_an_interrupt_of_the_main_process_leaves_nothing(start: Starter, processes: tuple[str, ...]) -> None:
    """Tests a signal to the main process only, as a process manager sends it."""
    server = start(*processes)
    assert len(server.descendants()) >= 1 + len(processes)
    ports = [connection.laddr.port for connection in connections(server, "tcp")]
    assert server.port not in ports, "only the main process may have the server's port open"
    sockets = socket_files(server)
    assert sockets
    server.signal(signal.SIGINT)
    assert wait_for_exit(server) == 130
    assert not [path for path in sockets if path.parent.exists()]


def test_ctrl_c_leaves_nothing(start: Starter) -> None:
    """Tests a signal to every process of the foreground group, as a terminal sends it."""
    server = start(*TWO_WORKERS)
    assert len(processes_titled(server, "Worker")) == 2
    server.signal_group(signal.SIGINT)
    assert wait_for_exit(server) == 130


@pytest.mark.parametrize("processes", [(), TWO_WORKERS], ids=["one process", "two workers"])
def test_a_killed_main_process_leaves_nothing(start: Starter, processes: tuple[str, ...]) -> None:
    server = start(*processes)
    assert len(server.descendants()) >= 1 + len(processes)
    server.signal(signal.SIGKILL)
    wait_for_exit(server)


def test_ctrl_c_during_start_up_leaves_nothing(start: Starter) -> None:
    """Tests Ctrl-C while the engine starts: vLLM's signal handler there only sets a flag until the engine is ready."""
    server = start.slow()
    server.signal_group(signal.SIGINT)
    assert wait_for_exit(server) == 130, "this is the status of a program that Ctrl-C ended"
    assert "Traceback" not in server.text()


def test_a_terminated_engine_is_an_error(start: Starter) -> None:
    """Tests SIGTERM to the engine only.

    The server must not take it for a Ctrl-C, although its event loop receives signals of processes forked from it.
    """
    server = start()
    (engine,) = processes_titled(server, "EngineCore")
    engine.send_signal(signal.SIGTERM)
    assert wait_for_exit(server) != 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_several_api_servers(start: Starter, number: signal.Signals) -> None:
    server = start("--api-server-count", "2", warm=False)
    server.signal(number)
    assert wait_for_exit(server) == 128 + number


@pytest.mark.exhaustive
def test_an_engine_that_was_stopped_for_a_while_goes_on(start: Starter) -> None:
    server = start()
    (engine,) = processes_titled(server, "EngineCore")
    request = Request(server)
    engine.send_signal(signal.SIGSTOP)
    time.sleep(10)
    assert request.is_alive()
    engine.send_signal(signal.SIGCONT)
    request.join(120)
    assert request.end == "complete"
    assert server.healthy()


CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),  # version 1
    (Path("/sys/fs/cgroup"), "memory.max"),
)


@pytest.fixture
def control_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Returns a new control group whose limit of memory is the parameter, in MiB."""
    for parent, limit in CONTROL_GROUPS:
        group = parent / f"backplane-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(request.param << 20))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no control group with a limit of memory can be made")


ROOM_FOR_IMPORTS = (
    r"the weights take 0\.\d+ GiB per worker, and \d\.\d+ GiB may be used on cpu \(0\.\d+ GiB free at start"
)
NO_ROOM = r"a control group .* limits the memory of this process to 0\.88 GiB, and a server needs 1 GiB besides weights"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("control_group", "text"), [(1200, ROOM_FOR_IMPORTS), (900, NO_ROOM)], indirect=["control_group"]
)
def test_a_control_group_without_room_is_an_error_with_the_numbers(
    control_group: Path, text: str, tmp_path: Path
) -> None:
    within = ["bash", "-c", f'echo $BASHPID > {control_group}/cgroup.procs && exec "$@"', "bash"]
    command = [*within, COMMAND, "serve", "smollm2", "--port", str(free_port())]
    # With a folder of its own for the memory ledger, reservations of other tests are not deducted.
    with Child(command, tmp_path / "server.log", {"TMPDIR": str(tmp_path)}) as server:
        assert server.wait(HANG_SECONDS) == 1
        assert not server.wait_for_nothing_left(HANG_SECONDS)
        assert re.search(text, server.text())


NUMBER_OF_MOMENTS = 20
MOST_SECONDS = 5
"""Seconds within which a signal must have ended a server. `make test`, which runs on busy machines, checks for hangs
only."""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("moments", [3, pytest.param(NUMBER_OF_MOMENTS, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "command", [COMMAND, pytest.param(VLLM, marks=pytest.mark.exhaustive)], ids=["vllm-backplane serve", "vllm serve"]
)
def test_a_signal_ends_the_server_at_any_moment(
    start: Starter, number: signal.Signals, moments: int, command: str
) -> None:
    """Tests random moments of the start, of serving with a request in flight, and a second signal while the server
    stops."""
    began = time.monotonic()
    start().kill()
    whole = time.monotonic() - began
    took, tokens = [], 0
    for moment in range(moments):
        # One in each part of the time, so that few moments also cover all of it.
        seconds = 1.2 * whole * (moment + random.random()) / moments
        port = free_port()
        server = start.starting(command, port)
        stream = Stream(port)
        time.sleep(seconds)
        server.descendants()
        sent = time.monotonic()
        server.signal(number)
        if moment % 2:
            time.sleep(0.2)
            server.signal(number)
        status = wait_for_exit(server)
        took.append(time.monotonic() - sent)
        stream.stop()
        tokens += stream.tokens
        # At the very beginning, and at a second signal while the server ends, the signal itself ends the process.
        expected = {128 + number, -number} if moment % 2 or seconds < whole / 2 else {128 + number}
        assert status in expected, f"{status} after {seconds:.2f} s of {whole:.2f} s\n{server.text()}"
        assert "Traceback" not in server.text(), f"after {seconds:.2f} s of {whole:.2f} s\n{server.text()}"
    print(f"{number.name}: ended within {max(took):.1f} s; {tokens} lines were streamed")
    if moments == NUMBER_OF_MOMENTS:
        assert tokens, "some signals must come while a request is in flight"
        assert max(took) <= MOST_SECONDS, sorted(took)


PROGRAM = """
import gc, sys, tempfile
first = tempfile.TemporaryDirectory()  # Python now runs finalizers after it has waited for child processes
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], max_model_len=64, max_num_seqs=2, dtype="float32", kv_cache_memory_bytes=1 << 24)
    [output] = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, ignore_eos=True))
    gc.freeze()  # the collector no longer lists the engine
    print("tokens:", len(output.outputs[0].token_ids))
"""


def test_the_program_of_a_user_ends(tiny_llama: Path, tmp_path: Path) -> None:
    """Tests a program that keeps its engine until the end, and has used a finalizer before it imports vLLM."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with Child([sys.executable, "program.py", str(tiny_llama)], tmp_path / "log") as child:
        assert wait_for_exit(child) == 0, child.text()
    assert "tokens: 4" in child.text()
    assert "Traceback" not in child.text() and "ERROR" not in child.text(), child.text()
