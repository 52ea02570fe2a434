"""A vLLM with a changed line: a fast path is switched off and tokens stay the same; anything else stops the start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from engine import batch, greedy, job, run_engines, try_engines

from vllm_patchbay.upstream.versions import installed_folder

RUNNER = "v1/worker/gpu_model_runner.py"
PREPARE = "        self.input_batch.block_table.commit_block_table(num_reqs)\n"
TO_LIST = "        return pinned.tolist()\n"
PROMPTS = [[1, 5, 9], [7, 3, 2, 8, 4], [6]]


def changed(folder: Path, old: str, new: str) -> dict[str, str | None]:
    """Returns variables with which Python imports a copy of vLLM that has one change in the model runner."""
    installed = installed_folder()
    assert installed is not None
    copy = folder / "site" / "vllm"
    shutil.copytree(installed, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    source = (installed / RUNNER).read_text()
    assert source.count(old) == 1
    (copy / RUNNER).unlink()
    (copy / RUNNER).write_text(source.replace(old, new))
    return {"PYTHONPATH": str(copy.parent)}


def generate(model: Path) -> dict[str, object]:
    return job(model, batch(PROMPTS, greedy(12)), enforce_eager=True)


def tokens(result: dict[str, object]) -> list[list[int]]:
    return [output["token_ids"] for output in result["batches"][0]]  # type: ignore[index]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    [result] = run_engines(tmp_path_factory.mktemp("plain"), [generate(tiny_llama)])
    return tokens(result)


def test_a_fast_path_is_switched_off(tiny_llama: Path, expected: list[list[int]], tmp_path: Path) -> None:
    variables = changed(tmp_path, PREPARE, f"{PREPARE}        changed_line = num_reqs  # noqa: F841\n")
    [result] = run_engines(tmp_path, [generate(tiny_llama)], variables, warm=False)
    assert tokens(result) == expected
    log = (tmp_path / "engine.log").read_text()
    assert "Fast path 'decode steps' is switched off, and vLLM's own code runs:" in log
    assert "GPUModelRunner._prepare_inputs" in log


@pytest.mark.parametrize("drift", ["error", "warn"])
def test_anything_else_stops_the_start(tiny_llama: Path, expected: list[list[int]], tmp_path: Path, drift: str) -> None:
    found = changed(tmp_path, TO_LIST, "        return list(pinned.tolist())\n")
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
