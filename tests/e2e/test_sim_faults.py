"""Tests faults of the simulated NPU: the engine ends in bounded time with a clear error, and leaves no process.

A hanging stream could keep a server from ending, so it is tested with servers. The other faults raise an exception
where they occur, which reaches a server like any other error of its engine. They are tested with engines that one
process starts one after another. An engine without a fault must then start and run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ending_servers import HANG_SECONDS, TWO_WORKERS, Request, Starter, wait_for_exit_after_fault
from engine import Result, batch, greedy, job, require_backplane, try_engines
from processes import START_METHOD

pytestmark = [pytest.mark.server, pytest.mark.models]

ATTENTION = "backplane::paged_attention"
SIM = {
    "BACKPLANE_DEVICE": "sim",
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_MEMORY": "1GiB",
    # Less than the default, because most tests wait for the timeout.
    "BACKPLANE_SIM_SYNC_TIMEOUT": "3",
}
TOKENS = 100
START = 90.0
"""Seconds in which a start with a fault must have ended. A collective would wait for minutes."""


# The model has four layers, so a token needs four launches of attention. vLLM reads the output of a step from the
# worker of card 0, which waits for the other one. Two workers are slow where they share a core with other processes, so
# the fault comes soon after the first token.
@pytest.mark.parametrize(
    ("arguments", "variables", "fault"),
    [
        # The device does not support fork. Without the variable, vLLM spawns the engine, as it does for users.
        pytest.param((), {START_METHOD: None}, f"hang@launch={ATTENTION},nth=80", id="of one card"),
        pytest.param(
            TWO_WORKERS,
            # The timeout is the driver's default, and the server must still end within the limit of this test.
            {"BACKPLANE_SIM_SYNC_TIMEOUT": ""},
            f"hang@launch={ATTENTION},nth=40,card=1",
            id="of the second of two cards",
            marks=pytest.mark.exhaustive,  # a hang of one card at the start, below, is one of two cards too
        ),
    ],
)
def test_a_stream_that_hangs_ends_the_server(
    arguments: tuple[str, ...],
    variables: dict[str, str | None],
    fault: str,
    start: Starter,
) -> None:
    server = start(*arguments, variables={**SIM, **variables, "BACKPLANE_SIM_FAULTS": fault})
    request = Request(server)
    server.descendants()
    assert wait_for_exit_after_fault(server) != 0
    request.must_have_failed()
    assert ATTENTION in server.text()
    if arguments:
        assert "Rank 1 failed in" in server.text()


@dataclass(frozen=True)
class Run:
    """Holds the result and the log of one engine."""

    result: Result
    log: str


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a launch fails": (f"fail@launch={ATTENTION},nth=120", {}),
    "a card disappears": (f"lost@launch={ATTENTION},nth=120,card=0", {}),
    # Without graphs, because replayed steps allocate almost no memory.
    "no memory": ("oom@alloc=4000", {"compilation_config": {"cudagraph_mode": "NONE"}}),
    "no memory at the start": ("oom@alloc=5", {}),
    "the second card hangs at the start": ("hang@launch=backplane::*linear,nth=1,card=1", {"tensor_parallel_size": 2}),
    "the second card disappears": (f"lost@launch={ATTENTION},nth=120,card=1", {"tensor_parallel_size": 2}),
    "a copy of the second card fails": ("fail@copy=copy_d2h,nth=60,card=1", {"tensor_parallel_size": 2}),
    "no fault that there is": ("melt@launch=5", {}),
    "none": ("", {}),
}
"""The fault and the engine arguments by name. The last engine has no fault."""


@pytest.fixture(scope="module")
def runs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    steps = [{"watch": batch([[7, 300, 21, 9000, 44]], greedy(TOKENS))}]
    jobs = [
        job(
            tiny_llama,
            steps=steps,
            additional_config={"backplane": {"sim": {"faults": fault} if fault else {}}},
            **engine,
        )
        for fault, engine in FAULTS.values()
    ]
    results, log = try_engines(tmp_path_factory.mktemp("faults"), jobs, SIM)
    logs = re.split(r"^=== engine \d+: .*$", log.read_text(errors="replace"), flags=re.MULTILINE)[1:]
    return {name: Run(result, text) for name, result, text in zip(FAULTS, results, logs, strict=True)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a launch fails", ATTENTION),
        ("a card disappears", "card 0"),
        ("no memory", "out of memory"),
        ("the second card disappears", "card 1"),
        ("a copy of the second card fails", "copy_d2h"),
    ],
)
def test_a_fault_ends_the_engine(runs: dict[str, Run], name: str, message: str) -> None:
    run = runs[name]
    assert "EngineDeadError" in run.result["error"], "the engine must have started before the fault"
    assert message in run.log
    if "second" in name:
        assert "Rank 1 failed in" in run.log
    assert run.result["left"] == [], "no process of the engine may be left"
    assert run.result["seconds"] < HANG_SECONDS, "the client must not wait for so long"


def test_no_memory_at_the_start_ends_it(runs: dict[str, Run]) -> None:
    run = runs["no memory at the start"]
    assert "Engine core initialization failed" in run.result["error"]
    assert "out of memory" in run.log
    assert run.result["left"] == []


def test_a_hang_of_one_card_at_the_start_ends_it(runs: dict[str, Run]) -> None:
    run = runs["the second card hangs at the start"]
    assert "Engine core initialization failed" in run.result["error"]
    assert "Rank 1 failed in profiling" in run.log
    assert "it hangs in 'backplane::" in run.log
    assert run.result["left"] == []
    assert run.result["whole"] < START


def test_a_fault_that_cannot_be_understood_is_refused(runs: dict[str, Run]) -> None:
    run = runs["no fault that there is"]
    assert "error" in run.result
    assert "'melt' is not a kind of fault; use one of oom, fail, hang, lost, corrupt" in run.log


def test_the_next_start_works(runs: dict[str, Run]) -> None:
    result = runs["none"].result
    assert "error" not in result, result["error"]
    require_backplane(result)
    assert result["steps"] == [[TOKENS]]
