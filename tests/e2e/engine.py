"""Runs vLLM engines for the tests: sends jobs to `run_engine.py` in a separate process, and returns their results."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import Child, tail

SCRIPT = Path(__file__).with_name("run_engine.py")
UNMODIFIED = "unmodified"
"""Argument of run_engine.py that makes it run vLLM without its changes that save time."""

BLOCK_TOKENS = 16
"""Tokens in a KV block, unless a test chooses another size."""

SIZES_OF_KV_CACHE = {"num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization"}
"""Arguments of an engine that affect the size of its KV cache."""

CALLS_OF_FUNCTIONS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Variables with which vLLM sends functions to workers (worker_rpc.py)."""

Result = dict[str, Any]
"""The result of one job, as run_engine.py describes it."""


def greedy(tokens: int, **more: Any) -> dict[str, Any]:
    """Returns sampling parameters for exactly `tokens` tokens by greedy decoding."""
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, **more}


def batch(prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any], *, one_by_one: bool = False) -> dict[str, Any]:
    """Returns a batch of a job: prompts in tokens, which run together or one after another."""
    return {"prompts": [list(ids) for ids in prompts], "sampling": dict(sampling), "one_by_one": one_by_one}


def job(
    model: Path,
    *batches: Mapping[str, Any],
    embed: Sequence[str] = (),
    steps: Sequence[Mapping[str, Any]] = (),
    **engine: Any,
) -> dict[str, Any]:
    """Returns a job: the arguments of one engine and its work.

    The default limits are small, which keeps the profiling step short: prompts are tokens, so no tokenizer is loaded
    unless texts are to be embedded, and the KV cache has twice the blocks that the largest batch needs, because vLLM
    would otherwise create some hundred thousand block objects. A test of the limits passes its own.
    """
    arguments: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
        "dtype": "float32",
    }
    arguments |= {"skip_tokenizer_init": not embed, **engine}
    blocks_of_batch = arguments["max_num_seqs"] * math.ceil(arguments["max_model_len"] / BLOCK_TOKENS)
    if not arguments.keys() & SIZES_OF_KV_CACHE:
        arguments["num_gpu_blocks_override"] = max(512, 2 * blocks_of_batch)
    result: dict[str, Any] = {
        "engine": {"model": str(model), **arguments},
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
    """Runs `jobs` and returns their results, each of which may be an {"error": …}, and the path of the log.

    With `warm` false, a new interpreter runs unmodified vLLM. Otherwise the program is forked where possible
    (tests/warm_start.py), and run_engine.py skips some of vLLM's work.
    """
    given, results, log = folder / "jobs.json", folder / "results.json", folder / "engine.log"
    given.write_text(json.dumps(jobs))
    command = [sys.executable, str(SCRIPT), str(given), str(results), *([] if warm else [UNMODIFIED])]
    given = {**(CALLS_OF_FUNCTIONS if warm else {}), **(variables or {})}
    with Child(command, log, given, warm=warm, with_vllm=True) as child:
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
    """Runs `jobs` and returns their results. All jobs must succeed, and run on Backplane and on `device`."""
    results, log = try_engines(folder, jobs, variables, timeout=timeout, warm=warm)
    for result in results:
        assert "error" not in result, f"{result['error']}\n{tail(log)}"
        require_backplane(result)
    started = log.read_text(errors="replace").count(f"Operators on device {device}:")
    assert started >= len(jobs), f"{started} workers logged that they run on {device}, not {len(jobs)}\n{tail(log)}"
    return results


def require_backplane(result: Result) -> None:
    """Fails unless the engine of the result ran on Backplane's platform and worker."""
    assert result["platform"] == "BackplanePlatform", result["platform"]
    assert result["worker"] == "vllm_backplane.worker.worker.BackplaneWorker", result["worker"]
