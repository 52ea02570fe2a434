"""Tests that patches reach the main process, the engine core and the workers, for each way in which vLLM starts them.

A distribution on PYTHONPATH provides patches, and each patch records the process in which it ran.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from engine import batch, greedy, job, try_engines
from processes import Child, on_path, tail
from server import Server

from vllm_patchbay.patch import take_fingerprint
from vllm_patchbay.upstream import SymbolIndex, installed_tree, installed_version

TARGETS = {
    "platform": "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "engine": "vllm.v1.engine.core:EngineCore.step",
    "worker": "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec",
}

USED = "vllm.model_executor.models.llama:LlamaForCausalLM.compute_logits"
UNUSED = "vllm.model_executor.models.gemma3:Gemma3ForCausalLM.compute_logits"
"""Targets of patches of one model each. The file of the second patch cannot be loaded."""

PATCH = """
import json, multiprocessing, os
from vllm_patchbay.patch import Patch, Process

@Patch(
    target="{target}",
    process=Process.{process},
    versions=">=0.30",
    why="a test",
    how="records the process it runs in",
    upstream="none: a test",
    remove_when="never",
    fingerprints={{"0.33.0": "{fingerprint}"}},
    on_import={on_import},
)
def recorded_{name}(self, *args, **kwargs):
    with open(os.environ["PATCH_RECORDS"], "a") as records:
        kind = type(multiprocessing.current_process()).__name__
        line = {{"patch": "{name}", "pid": os.getpid(), "kind": kind}}
        records.write(json.dumps(line) + "\\n")
    return recorded_{name}.original(self, *args, **kwargs)
"""


def _write(package: Path, index: SymbolIndex, target: str, name: str, *, on_import: bool = False) -> Path:
    module, _, qualified = target.partition(":")
    fingerprint = take_fingerprint(index.normalized_source_of(module, qualified))
    file = package / f"patch_{module.rpartition('.')[2]}.py"
    process = package.name.upper()
    file.write_text(
        PATCH.format(target=target, process=process, name=name, fingerprint=fingerprint, on_import=on_import)
    )
    return file


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distribution")
    index = SymbolIndex(installed_tree())
    for process, target in TARGETS.items():
        package = folder / "recorded_patches" / process
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        _write(package, index, target, process)
    _write(folder / "recorded_patches" / "worker", index, USED, "used", on_import=True)
    unused = _write(folder / "recorded_patches" / "worker", index, UNUSED, "unused", on_import=True)
    unused.write_text(unused.read_text() + "raise RuntimeError('loaded although the model is not used')\n")
    (folder / "recorded_patches" / "__init__.py").touch()
    metadata = folder / "recorded_patches-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: recorded-patches\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm_backplane.patches]\nrecorded = recorded_patches\n")
    return folder


def _variables(distribution: Path, records: Path, method: str) -> dict[str, str | None]:
    return {
        "PYTHONPATH": on_path(distribution),
        "PATCH_RECORDS": str(records),
        "VLLM_WORKER_MULTIPROC_METHOD": method,
    }


STARTED_BY = {"fork": "ForkProcess", "spawn": "SpawnProcess"}
"""Name of Python's class of child processes, by start method."""


def _ran_in(records: Path) -> tuple[dict[str, set[int]], dict[str, set[str]]]:
    """Returns the process ids and the kinds of processes, by patch."""
    pids: dict[str, set[int]] = {}
    kinds: dict[str, set[str]] = {}
    for line in records.read_text().splitlines():
        record = json.loads(line)
        pids.setdefault(record["patch"], set()).add(record["pid"])
        kinds.setdefault(record["patch"], set()).add(record["kind"])
    return pids, kinds


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_offline(method: str, distribution: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """Tests an engine whose two workers have their own processes, and one whose worker is in the engine's process.

    test_online tests spawned processes.
    """
    records = tmp_path / "records"
    work = batch([[1, 2, 3]], greedy(2))
    jobs = [job(tiny_llama, work), job(tiny_llama, work, tensor_parallel_size=2)]
    results, log = try_engines(tmp_path, jobs, _variables(distribution, records, method), warm=method == "fork")
    assert not any("error" in result for result in results), results
    where, kinds = _ran_in(records)
    assert set(where) == {"platform", "engine", "worker", "used"}, tail(log)
    assert len(where["platform"]) == 1
    assert len(where["engine"]) == len(jobs)
    assert not where["engine"] & where["platform"]  # the engine has a process of its own
    assert len(where["worker"]) == len(jobs) + 1
    assert len(where["worker"] & where["engine"]) == len(jobs) - 1
    assert not where["worker"] & where["platform"]
    assert where["used"] == where["worker"]
    assert kinds["engine"] == kinds["worker"] == {STARTED_BY[method]}
    logged = log.read_text()
    assert re.search(r"Patches of vLLM: .*recorded_platform applied, recorded_engine applied\b", logged)
    assert "Patch recorded_worker applied to" in logged


@pytest.fixture(scope="module")
def drifted(distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the distribution in which the engine's patch was written for another source of its target."""
    copy = tmp_path_factory.mktemp("drifted")
    shutil.copytree(distribution, copy, dirs_exist_ok=True)
    patch = copy / "recorded_patches" / "engine" / "patch_core.py"
    source = SymbolIndex(installed_tree()).normalized_source_of(*TARGETS["engine"].split(":"))
    assert "self.scheduler.has_requests()" in source
    before = take_fingerprint(source.replace("has_requests", "had_requests"))
    patch.write_text(patch.read_text().replace(str(take_fingerprint(source)), str(before)))
    return copy


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_online(drifted: Path, tiny_llama: Path, tmp_path: Path, workers: int) -> None:
    """Tests a server under spawn.

    One of the patches has drifted, and is applied because drift is only a warning.
    """
    records = tmp_path / "records"
    variables = {**_variables(drifted, records, "spawn"), "BACKPLANE_PATCH_DRIFT": "warn"}
    arguments = [
        str(tiny_llama),
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "128",
        "--tensor-parallel-size",
        str(workers),
    ]
    with Server(tmp_path, *arguments, variables=variables, warm=False) as server:
        answer = server.client().completions.create(model=str(tiny_llama), prompt=[1, 2, 3], max_tokens=2)
        assert answer.usage is not None
        logged = server.text()
    where, kinds = _ran_in(records)
    assert set(where) == {"platform", "engine", "worker", "used"}
    assert len(where["worker"]) == workers
    assert where["used"] == where["worker"]
    assert bool(where["engine"] & where["worker"]) == (workers == 1)
    assert not (where["engine"] | where["worker"]) & where["platform"]
    assert kinds["engine"] == kinds["worker"] == {"SpawnProcess"}
    assert DRIFTED in logged


DRIFTED = (
    f"recorded_engine: vllm.v1.engine.core:EngineCore.step in vLLM {installed_version()} is not what the patch was"
)


def test_a_drifted_patch_stops_the_start_with_a_diff(drifted: Path, tiny_llama: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        from vllm import LLM
        if __name__ == "__main__":
            LLM({str(tiny_llama)!r}, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128)
        """
    )
    (tmp_path / "start.py").write_text(script)
    records = tmp_path / "records"
    variables: dict[str, str | None] = {"PYTHONPATH": on_path(drifted), "PATCH_RECORDS": str(records)}
    with Child([sys.executable, "start.py"], tmp_path / "log", variables) as child:
        assert child.wait(120) != 0
        logged = child.text()
    assert DRIFTED in logged
    assert "BACKPLANE_PATCH_DRIFT=warn" in logged
    assert "- (1 line removed or changed)" in logged
    assert re.search(r"^.*  \+ .*self\.scheduler\.has_requests\(\)", logged, re.MULTILINE)
    assert not records.exists()
