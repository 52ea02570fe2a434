"""Faults of the simulated NPU end a server in a clear error, in time, with nothing left; the next start works."""

from __future__ import annotations

from pathlib import Path

import pytest
from endings import SMALL, TWO, Request, Starter, ends_after_a_fault
from processes import SCRIPTS, Child
from server import free_port

pytestmark = [pytest.mark.server, pytest.mark.models]

ATTENTION = "backplane::paged_attention"
SIM = {
    "BACKPLANE_DEVICE": "sim",
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_MEMORY": "1GiB",
    # Less than the default, because the end is waited for on machines that do other work as well.
    "BACKPLANE_SIM_SYNC_TIMEOUT": "5",
}


@pytest.fixture(autouse=True)
def _on_the_simulated_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIM.items():
        monkeypatch.setenv(name, value)


# The model has four layers, so a token needs four launches of attention.
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param(f"fail@launch={ATTENTION},nth=400", f"{ATTENTION}", id="a launch fails"),
        pytest.param(f"hang@launch={ATTENTION},nth=80", f"{ATTENTION}", id="a stream hangs"),
        pytest.param(f"lost@launch={ATTENTION},nth=400,card=0", "card 0", id="a card disappears"),
        pytest.param("oom@alloc=20000", "out of memory", id="no memory"),
    ],
)
def test_a_fault_while_serving_ends_the_server(
    fault: str, told: str, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPLANE_SIM_FAULTS", fault)
    server = start()
    request = Request(server)
    server.descendants()
    assert ends_after_a_fault(server, request) != 0
    request.must_have_failed()
    assert told in server.text()


# vLLM reads the answer to a step from the worker of card 0, which waits for the other one. Two workers are slow where
# they share a core with others, so the faults come soon after the first token.
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param(f"hang@launch={ATTENTION},nth=40,card=1", f"{ATTENTION}", id="a stream hangs"),
        pytest.param(f"lost@launch={ATTENTION},nth=60,card=1", "card 1", id="a card disappears"),
        pytest.param("fail@copy=copy_d2h,nth=150,card=1", "copy_d2h", id="a copy fails"),
    ],
)
def test_a_fault_of_the_second_of_two_cards_ends_the_server(
    fault: str, told: str, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPLANE_SIM_FAULTS", fault)
    server = start(*TWO)
    request = Request(server)
    server.descendants()
    assert ends_after_a_fault(server, request) != 0
    request.must_have_failed()
    assert told in server.text()
    assert "Rank 1 failed in" in server.text()


def test_no_memory_at_the_start_ends_it(tiny_llama: Path, tmp_path: Path) -> None:
    command = [str(SCRIPTS / "vllm-backplane"), "serve", str(tiny_llama), *SMALL, "--port", str(free_port())]
    variables = {"BACKPLANE_SIM_FAULTS": "oom@alloc=5"}
    with Child(command, tmp_path / "server.log", variables) as server:
        assert server.wait(120) != 0
        assert not server.wait_for_nothing_left(15)
        assert "out of memory" in server.text()


def test_a_fault_that_cannot_be_understood_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    command = [str(SCRIPTS / "vllm-backplane"), "serve", str(tiny_llama), *SMALL, "--port", str(free_port())]
    with Child(command, tmp_path / "server.log", {"BACKPLANE_SIM_FAULTS": "melt@launch=5"}) as server:
        assert server.wait(120) != 0
        assert "'melt' is no kind of fault; there are oom, fail, hang, lost, corrupt" in server.text()


def test_the_next_start_works(start: Starter) -> None:
    answer = start().client().completions.create(model="tiny", prompt="a", max_tokens=8, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens == 8
