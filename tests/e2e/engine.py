"""Engines for the tests: jobs go to `run_engine.py` in a process of its own, results come back."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import Child, tail

SCRIPT = Path(__file__).with_name("run_engine.py")
AS_IT_IS = "as-it-is"

Result = dict[str, Any]


def greedy(tokens: int, **more: Any) -> dict[str, Any]:
    """Sampling parameters for exactly `tokens` tokens without chance."""
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, **more}


def batch(prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any], *, one_by_one: bool = False) -> dict[str, Any]:
    return {"prompts": [list(ids) for ids in prompts], "sampling": dict(sampling), "one_by_one": one_by_one}


def job(
    model: Path,
    *batches: Mapping[str, Any],
    embed: Sequence[str] = (),
    steps: Sequence[Mapping[str, Any]] = (),
    **engine: Any,
) -> dict[str, Any]:
    """One engine. Small limits keep its profiling step short; a test that is about them names its own."""
    arguments = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 256, "dtype": "float32"}
    result: dict[str, Any] = {
        "engine": {"model": str(model), **arguments, **engine},
        "batches": list(batches),
        "steps": list(steps),
    }
    return {**result, "embed": list(embed)} if embed else result


def try_engines(
    folder: Path,
    jobs: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str | None] | None = None,
    *,
    timeout: float = 600,
    warm: bool = True,
) -> tuple[list[Result], Path]:
    """The results of `jobs`, of which each may be an {"error": …}, and the log. Not `warm`: in a new interpreter, and
    without anything that spares time."""
    given, results, log = folder / "jobs.json", folder / "results.json", folder / "engine.log"
    given.write_text(json.dumps(jobs))
    command = [sys.executable, str(SCRIPT), str(given), str(results), *([] if warm else [AS_IT_IS])]
    with Child(command, log, variables, warm=warm) as child:
        status = child.wait(timeout)
        assert status == 0, f"exit status {status}\n{tail(log)}"
    return json.loads(results.read_text()), log


def run_engines(
    folder: Path,
    jobs: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str | None] | None = None,
    *,
    device: str = "cpu",
    timeout: float = 600,
    warm: bool = True,
) -> list[Result]:
    """The results of `jobs`, all of which must have run, and on Backplane."""
    results, log = try_engines(folder, jobs, variables, timeout=timeout, warm=warm)
    for result in results:
        assert "error" not in result, f"{result['error']}\n{tail(log)}"
        insist_on_backplane(result)
    started = log.read_text(errors="replace").count(f"Operators on device {device}:")
    assert started >= len(jobs), f"{started} workers say that they run on {device}, expected {len(jobs)}\n{tail(log)}"
    return results


def insist_on_backplane(result: Result) -> None:
    assert result["platform"] == "BackplanePlatform", result["platform"]
    assert result["worker"] == "vllm_backplane.worker.worker.BackplaneWorker", result["worker"]
