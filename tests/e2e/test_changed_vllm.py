"""Tests a vLLM with a changed line: a fast path is switched off and tokens stay the same; else the start is stopped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from engine import batch, greedy, job, run_engines, try_engines

from vllm_patchbay.upstream.versions import installed_folder

RUNNER = "v1/worker/gpu_model_runner.py"
PREPARE = "        self.input_batch.block_table.commit_block_table(num_reqs)\n"
CONSTRUCT = "        self.arange_np = np.arange(arange_size, dtype=np.int64)\n"
TO_LIST = "        return pinned.tolist()\n"
PROMPTS = [[1, 5, 9], [7, 3, 2, 8, 4], [6]]


def changed(folder: Path, changes: dict[str, str]) -> dict[str, str | None]:
    """Returns variables with which Python imports a copy of vLLM whose model runner has each old text replaced by the
    new one."""
    installed = installed_folder()
    assert installed is not None
    copy = folder / "site" / "vllm"
    shutil.copytree(installed, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    source = (installed / RUNNER).read_text()
    for old, new in changes.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    (copy / RUNNER).unlink()
    (copy / RUNNER).write_text(source)
    return {"PYTHONPATH": str(copy.parent)}


def generate(model: Path) -> dict[str, object]:
    return job(model, batch(PROMPTS, greedy(12)), enforce_eager=True)


def tokens(result: dict[str, object]) -> list[list[int]]:
    return [output["token_ids"] for output in result["batches"][0]]  # type: ignore[index]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    [result] = run_engines(tmp_path_factory.mktemp("plain"), [generate(tiny_llama)])
    return tokens(result)


MORE_BUFFER = {
    CONSTRUCT: f"        self.more = self._make_buffer(self.max_num_reqs, dtype=torch.int32)\n{CONSTRUCT}",
    PREPARE: f"{PREPARE}        self.more.np[:num_reqs] = num_scheduled_tokens\n        self.more.copy_to_gpu()\n",
}


def test_a_fast_path_is_switched_off(tiny_llama: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """A release that writes one more buffer in each step is served by its own code. The buffer is allocated in a
    constructor, some of whose other statements stop the start if they change."""
    variables = changed(tmp_path, MORE_BUFFER)
    [result] = run_engines(tmp_path, [generate(tiny_llama)], variables, warm=False)
    assert tokens(result) == expected
    log = (tmp_path / "engine.log").read_text()
    assert "Fast path 'decode steps' is switched off, and vLLM's own code runs:" in log
    assert "GPUModelRunner.__init__" in log


@pytest.mark.parametrize("drift", ["error", "warn"])
def test_anything_else_stops_the_start(tiny_llama: Path, expected: list[list[int]], tmp_path: Path, drift: str) -> None:
    found = changed(tmp_path, {TO_LIST: "        return list(pinned.tolist())\n"})
    found = {**found, "BACKPLANE_PATCH_DRIFT": drift if drift == "warn" else None}
    [result], log = try_engines(tmp_path, [generate(tiny_llama)], found, warm=False)
    text = log.read_text()
    assert "GPUModelRunner._to_list, on which vllm_backplane.runner.v1 depends" in text
    if drift == "warn":
        assert tokens(result) == expected
    else:
        assert "error" in result
        assert "return list(pinned.tolist())" in text
        assert "BACKPLANE_PATCH_DRIFT=warn" in text
