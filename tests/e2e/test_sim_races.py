"""Tests race detection on the simulated NPU: it reports missing synchronization in steps of vLLM, and nothing else.

The tests plant errors that often stay without effect: the tokens are sometimes or always correct.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine import Result, batch, greedy, job, try_engines
from processes import SIM

pytestmark = [pytest.mark.server, pytest.mark.models]

WORK = {"batch": batch([[7, 300, 21, 9000, 44], [40000], [5, 6]], greedy(8))}
COUNT = {"rpc": "missing_synchronizations"}
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
DECODE = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
MISSING = "backplane sim: missing synchronization: "


@pytest.fixture(scope="module")
def reported(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, str]:
    """Returns the result and the log of an engine that only reports missing synchronization and goes on."""
    plants = ({"rpc": "plant_unawaited_stream"}, WORK, COUNT, {"rpc": "plant_unawaited_input"}, WORK, COUNT)
    steps = (WORK, COUNT, *plants)
    engine = job(tiny_llama, steps=steps, compilation_config=DECODE, async_scheduling=True, **LIMITS)
    variables = {**SIM, "BACKPLANE_SIM_RACES": "report"}
    [result], log = try_engines(tmp_path_factory.mktemp("races"), [engine], variables)
    text = log.read_text(errors="replace")
    assert "error" not in result, result["error"] + text[-4000:]
    return result, text


def test_a_clean_step_has_none(reported: tuple[Result, str]) -> None:
    assert reported[0]["steps"][1] == [0], reported[1][-4000:]


def test_tokens_copied_before_they_are_sampled(reported: tuple[Result, str]) -> None:
    steps, log = reported[0]["steps"], reported[1]
    assert steps[4][0] > steps[1][0]
    report = re.search(
        re.escape(MISSING)
        + r"'copy_d2h' on stream ([1-9]\d*) of card 0 reads bytes 0 to \d+ of the allocation 0x\S+ of "
        r"card 0, which '\S+' on stream 0 of card 0 writes, .* it may read the old contents\. Record an event on "
        r"stream 0 of card 0 after '\S+' and let stream \1 of card 0 wait for it",
        log,
    )
    assert report, log[-4000:]


def test_a_graph_replayed_before_its_input_is_there(reported: tuple[Result, str]) -> None:
    """Tests an error that is planted for replayed steps only."""
    steps, log = reported[0]["steps"], reported[1]
    assert steps[7][0] > steps[4][0]
    report = re.search(
        re.escape(MISSING)
        + r"'\S+' on stream 0 of card 0 reads .*, which 'copy_d2d' on stream [1-9]\d* of card 0 writes",
        log,
    )
    assert report, log[-4000:]


@pytest.fixture(scope="module")
def failing(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Result, str]]:
    """Returns the results and logs of two engines that fail on missing synchronization.

    The first has two cards and no error, and the second has a planted error.
    """
    planted = (WORK, {"rpc": "plant_unawaited_tokens"}, WORK)
    engines = [
        job(tiny_llama, steps=(WORK, WORK, COUNT), tensor_parallel_size=2, async_scheduling=True, **LIMITS),
        job(tiny_llama, steps=planted, async_scheduling=False, **LIMITS),
    ]
    variables = {**SIM, "BACKPLANE_SIM_RACES": "fail"}
    results, log = try_engines(tmp_path_factory.mktemp("failing"), engines, variables, timeout=240)
    logs = re.split(r"^=== engine \d+: .*$", log.read_text(errors="replace"), flags=re.MULTILINE)[1:]
    return list(zip(results, logs, strict=True))


def test_two_cards_have_none(failing: list[tuple[Result, str]]) -> None:
    """Tests two cards without an error. The output of the second is not read, and is freed while it is copied."""
    result, log = failing[0]
    assert "error" not in result, result["error"] + log[-4000:]
    assert result["steps"][2] == [0, 0], log[-4000:]


def test_tokens_read_before_they_have_arrived(failing: list[tuple[Result, str]]) -> None:
    """Tests that the engine ends with the error if missing synchronization is fatal."""
    result, text = failing[1]
    assert "EngineDeadError" in result["error"], result["error"]
    early = r"the host accessed 0x\S+, byte 0 of \d+ in pinned memory that 'copy_d2h' on stream 0 of card 0 writes"
    assert MISSING in text, text[-4000:]
    assert re.match(re.escape(MISSING) + early, text[text.index(MISSING) :]), "the first report must be the error"
    assert re.search(r"AcceleratorError: .*missing synchronization: " + early, text), text[-4000:]
