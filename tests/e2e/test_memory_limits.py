"""Tests that the KV cache is sized by the free memory, that logs show the sizes, and that larger requests fail."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import reference
from engine import Result, batch, greedy, job, require_backplane, try_engines
from processes import SCRIPTS, Child

from tests.ports import free_port

pytestmark = [pytest.mark.server, pytest.mark.models]

GIB = 1 << 30
ROUNDING = 0.02
"""Tolerance in GiB for sums of a few logged numbers, which have two decimals."""

BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4
"""Bytes of a token in the KV cache of the tiny Llama: layers, K and V, KV heads, head size, bytes of a float32."""

TEN_TERABYTES = 10 * 10**12
ROOM = 4 * 256
"""Capacity of the small KV cache in tokens. A sequence below needs 141 tokens, so seven sequences fit."""

LENGTH = 80
CROWD = [[10 + place, *range(100, 160)] for place in range(24)]
WATCHED = (5, 10, 11)
"""Indexes of the checked prompts: two that wait from the beginning, and one that may be preempted. None of their
outputs is near a tie."""


@dataclass(frozen=True)
class Attempt:
    """Holds the result and the log of one engine."""

    result: Result
    log: str
    available: int
    """Available memory of the machine in bytes before the first engine was started."""


@pytest.fixture(scope="module")
def attempts(tiny_llama: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Attempt]:
    """Returns the attempts by name: engines with various memory settings, which one process runs."""
    available = psutil.virtual_memory().available
    half_of_the_weights = json.loads((smollm2 / "backplane-manifest.json").read_text())
    weights = half_of_the_weights["files"]["model.safetensors"]["size"]
    work = batch([[5, 6, 7]], greedy(4))
    too_small = {"backplane": {"memory_share": weights / 2 / available}}
    named_share = {"backplane": {"memory_share": 0.25}}
    all_blocks: dict[str, Any] = {"num_gpu_blocks_override": None}  # as many as fit
    engines = {
        "default": job(tiny_llama, work, **all_blocks),
        "named share": job(tiny_llama, work, additional_config=named_share, **all_blocks),
        "requested": job(tiny_llama, work, kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.3),
        "crowded": job(
            tiny_llama,
            batch(CROWD, greedy(LENGTH)),
            batch([CROWD[place] for place in WATCHED], greedy(LENGTH), one_by_one=True),
            kv_cache_memory_bytes=ROOM * BYTES_PER_TOKEN,
            max_num_seqs=len(CROWD),
            enable_prefix_caching=False,
        ),
        "too much": job(tiny_llama, work, kv_cache_memory_bytes=TEN_TERABYTES),
        "too many blocks": job(tiny_llama, work, num_gpu_blocks_override=TEN_TERABYTES // (16 * BYTES_PER_TOKEN)),
        "no room for the weights": job(smollm2, work, additional_config=too_small, **all_blocks),
        "no room for one sequence": job(tiny_llama, work, kv_cache_memory_bytes=128 * BYTES_PER_TOKEN),
    }
    folder = tmp_path_factory.mktemp("memory")
    # With a folder of its own for the memory ledger, reservations of other tests are not deducted.
    results, log = try_engines(folder, list(engines.values()), {"TMPDIR": str(folder)})
    texts = re.split(r"^=== engine \d+: .*$", log.read_text(errors="replace"), flags=re.MULTILINE)[1:]
    for name, result in zip(engines, results, strict=True):
        if name in ("default", "named share", "requested", "crowded"):
            assert "error" not in result, f"{name}: {result['error']}"
            require_backplane(result)
        else:
            assert "error" in result, f"{name}: the engine must not start"
    return {name: Attempt(result, text, available) for name, result, text in zip(engines, results, texts, strict=True)}


def numbers(pattern: str, text: str) -> tuple[float, ...]:
    """Returns the numbers in the groups of the first match of `pattern`."""
    found = re.search(pattern, text)
    assert found, f"no line matches {pattern!r}"
    return tuple(float(group.replace(",", "")) for group in found.groups())


def start_line(text: str) -> tuple[float, float, float, float]:
    """Returns the logged total memory, free memory, share and allowance, in GiB."""
    line = r"Memory on cpu: ([\d.]+) GiB in all, ([\d.]+) GiB free; .* take ([\d.]+) of that = ([\d.]+) GiB"
    total, free, share, allowed = numbers(line, text)
    return total, free, share, allowed


def test_the_allowance_is_a_share_of_what_is_there(attempts: dict[str, Attempt]) -> None:
    total, free, share, allowed = start_line(attempts["default"].log)
    machine = psutil.virtual_memory()
    assert 0 < free <= total <= machine.total / GIB + ROUNDING
    most = max(machine.available, attempts["default"].available)
    assert free <= most / GIB + 4, "other processes change the free memory, but by less than 4 GiB"
    assert share == 0.5, "this is the default share of the cpu device"
    assert allowed == pytest.approx(free * share, abs=ROUNDING)


@pytest.mark.parametrize("name", ["default", "named share"])
def test_the_kv_cache_is_within_the_allowance(attempts: dict[str, Attempt], name: str) -> None:
    *_, allowed = start_line(attempts[name].log)
    granted, activations = numbers(r"KV cache: ([\d.]+) GiB; ([\d.]+) GiB are reserved", attempts[name].log)
    (tokens,) = numbers(r"KV cache size: ([\d,]+) tokens", attempts[name].log)
    assert 0 < granted <= allowed - activations + ROUNDING
    assert tokens * BYTES_PER_TOKEN <= (granted + ROUNDING) * GIB
    assert tokens * BYTES_PER_TOKEN >= (granted - ROUNDING) * GIB - 16 * BYTES_PER_TOKEN, "all must be used"


@pytest.mark.parametrize(("name", "named"), [("named share", 0.25), ("requested", 0.3)], ids=["option", "vLLM's own"])
def test_a_named_share_is_obeyed(attempts: dict[str, Attempt], name: str, named: float) -> None:
    _, free, share, allowed = start_line(attempts[name].log)
    assert share == named
    assert allowed == pytest.approx(free * named, abs=ROUNDING)


def test_a_named_size_is_obeyed(attempts: dict[str, Attempt]) -> None:
    (tokens,) = numbers(r"KV cache size: ([\d,]+) tokens", attempts["requested"].log)
    assert tokens == (64 << 20) // BYTES_PER_TOKEN


def test_more_sequences_than_the_cache_holds_wait_their_turn(attempts: dict[str, Attempt], tiny_llama: Path) -> None:
    """Tests that sequences wait or are preempted when the KV cache is full, and that their outputs do not change."""
    together, alone = ([output["token_ids"] for output in done] for done in attempts["crowded"].result["batches"])
    assert all(len(answer) == LENGTH for answer in together)
    reference.require_no_tie(tiny_llama, [CROWD[place] for place in WATCHED], LENGTH)
    assert [together[place] for place in WATCHED] == alone
    assert numbers(r"KV cache size: ([\d,]+) tokens", attempts["crowded"].log) == (ROOM,)


@pytest.mark.parametrize(
    ("name", "option"), [("too much", "kv-cache-memory-bytes"), ("too many blocks", "num-gpu-blocks-override")]
)
def test_more_than_there_is_is_refused(attempts: dict[str, Attempt], name: str, option: str) -> None:
    error = rf"a KV cache of ([\d.]+) GiB was requested, and ([\d.]+) GiB of ([\d.]+) GiB is free .*lower --{option}"
    requested, free, total = numbers(error, attempts[name].log)
    assert requested == pytest.approx(TEN_TERABYTES / GIB, abs=ROUNDING)
    assert 0 < free < total <= psutil.virtual_memory().total / GIB + ROUNDING


def test_weights_that_do_not_fit_are_refused(attempts: dict[str, Attempt]) -> None:
    text = attempts["no room for the weights"].log
    assert "KV cache size" not in text
    assert re.search(r"BackplaneError: .* [\d.]+ GiB .*memory_share", text, flags=re.IGNORECASE)


def test_a_cache_too_small_for_one_sequence_is_refused(attempts: dict[str, Attempt]) -> None:
    text = attempts["no room for one sequence"].log
    assert re.search(r"ValueError: .*\b256\b.*GiB", text), "vLLM's own check must report the length and the sizes"


def test_the_server_ends_with_the_error(tiny_llama: Path, tmp_path: Path) -> None:
    """Tests that the command ends with an error too, instead of running without being able to serve."""
    arguments = [
        "--max-model-len",
        "256",
        "--kv-cache-memory-bytes",
        str(TEN_TERABYTES),
        "--port",
        str(free_port()),
    ]
    command = [str(SCRIPTS / "vllm-backplane"), "serve", str(tiny_llama), *arguments]
    with Child(command, tmp_path / "server.log", warm=True) as child:
        assert child.wait(300) != 0
        assert not child.wait_for_nothing_left(60)
        assert "a KV cache of 9313.23 GiB was requested" in child.text()
