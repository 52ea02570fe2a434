"""Tests KV offload to disk and to host memory: loaded blocks give the same output as computed ones.

The server is started with the command of docs/serve/kv-offload.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import reference
import tiny_models
from engine import batch, greedy, job, run_engines
from processes import SIM
from server import Server

pytestmark = [pytest.mark.server, pytest.mark.models]

FEATURE = "KV cache: offload to host memory or disk"
BOUND, DAMAGED = "KV cache: size bound of KV offload", "KV cache: damaged blocks of KV offload are computed again"
TOKENS = 8
LENGTH = 150
"""Number of tokens of a prompt: nine full blocks and a part of one."""
FULL_BLOCKS = LENGTH // 16
KEPT = 32
"""Number of blocks that fit into the capacity."""
BLOCK = 32 << 10
"""Bytes of a block of the tiny model."""
LOGPROBS = 1e-3
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "kv-offload.md").read_text()


class Case:
    """Holds prompts, and the outputs of transformers."""

    def __init__(self, folder: Path) -> None:
        random_ids = random.Random(7)
        self.prompts = [[random_ids.randrange(100, 40000) for _ in range(LENGTH)] for _ in range(3)]
        self.expected = reference.continue_together(reference.load(folder), self.prompts, TOKENS)


class OffloadServer:
    """Sends requests to a server with KV offload to a folder, and reads its counts and files."""

    def __init__(self, server: Server, folder: Path, capacity: int) -> None:
        self.server, self.folder, self.capacity = server, folder, capacity

    def counts(self) -> dict[str, int]:
        """Returns how many blocks the server has handled, by outcome."""
        outcomes = ("stored", "loaded", "evicted", "damaged", "missing")
        return {name: int(self.server.metric("backplane:kv_offload_blocks_total", outcome=name)) for name in outcomes}

    def change(self, before: dict[str, int]) -> dict[str, int]:
        """Returns the counts that have changed since `before`, with the differences."""
        return {name: count - before[name] for name, count in self.counts().items() if count != before[name]}

    def forget_prefixes(self, **parameters: str) -> None:
        """Clears vLLM's own prefix cache."""
        assert self.server.http.post("/reset_prefix_cache", params=parameters).status_code == 200

    def generate(self, prompt: Sequence[int], **more: Any) -> tuple[list[int], list[float]]:
        """Returns the tokens and log-probabilities of a greedy completion."""
        choice = self.server.complete(prompt, TOKENS, logprobs=0, **more)
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def files(self) -> list[Path]:
        """Returns the unnamed files with blocks, through the processes that have them open."""
        found = []
        for process in self.server.descendants():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                for file in Path(f"/proc/{process.pid}/fd").iterdir():
                    with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                        if os.readlink(file).startswith(f"{self.folder}/"):
                            found.append(file)
        return found

    @property
    def file(self) -> Path:
        [file] = self.files()
        return file


@pytest.fixture(scope="module", params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(tiny_llama: Path) -> Case:
    return Case(tiny_llama)


@pytest.fixture(scope="module")
def offload(device: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OffloadServer]:
    folder = tmp_path_factory.mktemp("offload")
    [documented] = re.findall(r"^vllm-backplane serve --kv-transfer-config '(.*)'$", PAGE, re.MULTILINE)
    transfer = json.loads(documented.replace("/path/to/folder", str(folder)))
    transfer["kv_connector_extra_config"]["capacity"] = capacity = KEPT * BLOCK
    limits = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--dtype", "float32")
    given = (str(tiny_llama), "--served-model-name", "tiny", *limits, "--kv-transfer-config", json.dumps(transfer))
    variables = SIM if device == "sim" else {}
    with Server(tmp_path_factory.mktemp("server"), *given, variables=variables) as server:
        assert f"Operators on device {device}:" in server.text()
        yield OffloadServer(server, folder, capacity)


def assert_expected(got: tuple[list[int], list[float]], expected: reference.Continuation) -> None:
    assert got[0] == expected.token_ids
    assert got[1] == pytest.approx(expected.logprobs, abs=LOGPROBS)


def test_the_comparison_would_notice(case: Case) -> None:
    assert min(one.smallest_margin for one in case.expected) > 5e-3, "near a tie; change the seed"
    assert len({tuple(one.token_ids) for one in case.expected}) == len(case.expected)


@pytest.mark.feature(FEATURE, "{device}")
def test_what_vllm_forgot_is_loaded(offload: OffloadServer, case: Case) -> None:
    before, tokens = offload.counts(), offload.server.metric("vllm:external_prefix_cache_hits_total")
    assert_expected(offload.generate(case.prompts[0]), case.expected[0])
    assert offload.change(before) == {"stored": FULL_BLOCKS}
    offload.forget_prefixes()
    assert_expected(offload.generate(case.prompts[0]), case.expected[0])
    assert offload.change(before) == {"stored": FULL_BLOCKS, "loaded": FULL_BLOCKS}
    assert offload.server.metric("vllm:external_prefix_cache_hits_total") - tokens == FULL_BLOCKS * 16


def test_another_salt_finds_nothing(offload: OffloadServer, case: Case) -> None:
    offload.forget_prefixes()
    before = offload.counts()
    assert_expected(offload.generate(case.prompts[0], cache_salt="mine"), case.expected[0])
    assert "loaded" not in offload.change(before)


@pytest.mark.feature(DAMAGED, "{device}")
def test_damaged_blocks_are_computed_again(offload: OffloadServer, case: Case) -> None:
    """Tests three kinds of damage: one byte of one block, the whole file, and a truncated file."""
    offload.forget_prefixes()
    offload.generate(case.prompts[0])
    size = offload.file.stat().st_size
    for damage in (one_byte, everything, cut_off):
        damage(offload.file)
        offload.forget_prefixes()
        before = offload.counts()
        assert_expected(offload.generate(case.prompts[0]), case.expected[0])
        change = offload.change(before)
        assert change["damaged"] == (1 if damage is one_byte else FULL_BLOCKS)
        assert change["stored"] == change["damaged"], "recomputed blocks must be stored again"
        offload.forget_prefixes()
        before = offload.counts()
        assert_expected(offload.generate(case.prompts[0]), case.expected[0])
        assert offload.change(before) == {"loaded": FULL_BLOCKS}
        assert offload.file.stat().st_size <= size
    assert "fails its checksum" in offload.server.text()


def one_byte(file: Path) -> None:
    with file.open("r+b") as opened:
        row = opened.read(4096)
        opened.seek(1000)
        opened.write(bytes([row[1000] ^ 0x40]))


def everything(file: Path) -> None:
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.write(random.Random(1).randbytes(size))


def cut_off(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(0)


@pytest.mark.feature(BOUND, "{device}")
def test_no_more_is_kept_than_the_bound(offload: OffloadServer, case: Case) -> None:
    """Tests eviction: of twice as many blocks as fit, the most recently used ones are stored, and the first are not."""
    first, last = case.prompts[1], case.prompts[2]
    offload.generate(first)
    before, drawn = offload.counts(), random.Random(3)
    for _ in range(2 * KEPT // FULL_BLOCKS):
        offload.generate([drawn.randrange(100, 40000) for _ in range(LENGTH)])
    assert offload.change(before)["evicted"] > 0
    offload.generate(last)
    offload.forget_prefixes()
    before = offload.counts()
    assert_expected(offload.generate(last), case.expected[2])
    assert offload.change(before) == {"loaded": FULL_BLOCKS}
    before = offload.counts()
    assert_expected(offload.generate(first), case.expected[1])
    assert "loaded" not in offload.change(before)
    assert offload.file.stat().st_size <= offload.capacity


def test_a_reset_of_external_caches_clears_the_offloaded_blocks(offload: OffloadServer, case: Case) -> None:
    offload.generate(case.prompts[0])
    offload.forget_prefixes(reset_external="true")
    before = offload.counts()
    assert_expected(offload.generate(case.prompts[0]), case.expected[0])
    assert offload.change(before) == {"stored": FULL_BLOCKS}


def test_the_file_has_no_name_and_is_private(offload: OffloadServer) -> None:
    """Tests that other users cannot open the file, from which prompts could be reconstructed."""
    assert list(offload.folder.iterdir()) == []
    assert offload.file.stat().st_mode & 0o077 == 0


@pytest.mark.feature(DAMAGED, "sim")
@pytest.mark.feature(FEATURE, "sim")
def test_in_host_memory_on_two_cards(tiny_llama: Path, case: Case, tmp_path: Path) -> None:
    """Tests that both cards compute blocks again which are damaged on the second card only."""
    work = {"batch": batch(case.prompts, greedy(TOKENS, logprobs=0))}
    forget = {"forget prefixes": None}
    steps = [work, forget, work, {"rpc": "damage_kept_blocks"}, forget, work, forget, work]
    transfer = {
        "kv_connector": "BackplaneOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"capacity": "4MiB"},
    }
    one = job(tiny_llama, steps=steps, tensor_parallel_size=2, kv_transfer_config=transfer)
    [result] = run_engines(tmp_path, [one], SIM, device="sim")
    computed, _, loaded, damaged, _, recomputed, _, again = result["steps"]
    assert damaged[0] == 0 and damaged[1] > 0
    for outputs in (computed, loaded, recomputed, again):
        for output, expected in zip(outputs, case.expected, strict=True):
            assert_expected((output["token_ids"], output["logprobs"]), expected)
    cached = [[output["num_cached_tokens"] for output in outputs] for outputs in (computed, loaded, again)]
    assert cached == [[0] * 3, [FULL_BLOCKS * 16] * 3, [FULL_BLOCKS * 16] * 3]
    assert "fails its checksum" in (tmp_path / "engine.log").read_text()


@pytest.mark.feature(FEATURE, "cpu")
def test_new_weights_take_over_completely(tiny_llama: Path, smollm2: Path, case: Case, tmp_path: Path) -> None:
    """Tests that nothing which other weights computed is saved: neither for a request in flight, nor during a transfer
    of weights, nor from vLLM's own prefix cache, which is not reset at first. Later blocks equal those of a new engine.
    """
    folder = tmp_path / "other weights"
    tiny_models.save_llama(folder, tokenizer_of=smollm2, seed=2)
    expected = reference.continue_together(reference.load(folder), case.prompts, TOKENS)
    assert min(one.smallest_margin for one in expected) > 5e-3, "near a tie; change the seed"
    first, second, third = (batch([prompt], greedy(TOKENS)) for prompt in case.prompts)
    everything = {"batch": batch(case.prompts, greedy(TOKENS, logprobs=0))}
    forget = {"forget prefixes": None}

    def save(name: str) -> dict[str, Any]:
        return {"rpc": ["save_offloaded_blocks", str(tmp_path / f"{name}.npz")]}

    steps: list[dict[str, Any]] = [
        {"batch": first},
        save("old"),
        {"interrupted": {**second, "after": 1, "by": [{"rpc": ["load_weights", str(folder)]}]}},
        {"batch": first},
        save("reloaded"),
        {"rpc": "use_file_transfer"},
        {"call": "start_weight_update"},
        {"call": ["update_weights", {"folder": str(tiny_llama)}]},
        {"batch": third},
        save("during a transfer"),
        {"call": ["update_weights", {"folder": str(folder)}]},
        {"call": "finish_weight_update"},
        {"batch": third},
        save("transferred"),
        *(forget, everything, save("new"), forget, everything),
    ]
    transfer = {
        "kv_connector": "BackplaneOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"capacity": "4MiB"},
    }
    engine: dict[str, Any] = {"max_num_batched_tokens": 64, "kv_transfer_config": transfer}
    # In one process, a step of the test is a step of the engine, so a request is in flight for certain.
    in_one = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    [result] = run_engines(tmp_path, [job(tiny_llama, steps=steps, **engine)], in_one)
    log = (tmp_path / "engine.log").read_text()
    run_engines(tmp_path, [job(folder, steps=[everything, save("fresh")], **engine)])
    computed, loaded = result["steps"][-4], result["steps"][-1]
    for outputs in (computed, loaded):
        for output, one in zip(outputs, expected, strict=True):
            assert_expected((output["token_ids"], output["logprobs"]), one)
    assert [output["num_cached_tokens"] for output in computed] == [0] * 3
    assert [output["num_cached_tokens"] for output in loaded] == [FULL_BLOCKS * 16] * 3
    blocks = {path.stem: dict(numpy.load(path)) for path in tmp_path.glob("*.npz")}
    assert len(blocks["old"]) == FULL_BLOCKS
    assert [len(blocks[name]) for name in ("reloaded", "during a transfer", "transferred")] == [0, 0, 0]
    assert len(blocks["new"]) == 3 * FULL_BLOCKS
    assert blocks["new"].keys() == blocks["fresh"].keys()
    for key, block in blocks["new"].items():
        numpy.testing.assert_allclose(block, blocks["fresh"][key], atol=1e-4)
    assert "reset it when weights have been replaced" in log
