"""Measures servers over HTTP: their start-up, and their throughput under the load of vLLM's own client."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.compare.drivers import EngineFailure, Figures, Job, environment, failure_of, stop
from benchmarks.compare.machine import cores
from benchmarks.compare.variants import LLAMA_CPP, OURS, Variant
from benchmarks.compare.workloads import Point, Workload

SERVED_NAME = "default"


def startup(job: Job, workload: Workload, variant: Variant) -> Figures:
    """Returns the seconds from the start of the server's process to its first token."""
    (point,) = workload.points
    command, port = server_command(job, workload, variant)
    began = time.perf_counter()
    with running(command, variant, port, job.timeout):
        first_token(port, job.timeout)
        return [(point.name, time.perf_counter() - began)]


def load(job: Job, workload: Workload, variant: Variant) -> Figures:
    """Returns figures of `vllm bench serve`. Points that differ only in their metric share a run."""
    command, port = server_command(job, workload, variant)
    figures: Figures = []
    with running(command, variant, port, job.timeout):
        first_token(port, job.timeout)
        results: dict[tuple[int, float], dict[str, Any]] = {}
        for point in workload.points:
            key = point.requests, point.rate
            if key not in results:
                results[key] = run_client(job, port, point)
            figures.append((point.name, float(results[key][point.metric])))
    return figures


SPARE_TOKENS = 512
"""Additional tokens of the KV cache: vLLM reserves a block, and the last block of a sequence may be nearly empty."""


def server_command(job: Job, workload: Workload, variant: Variant) -> tuple[list[str], int]:
    """Returns the command line of a server, and its port."""
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port)]
    # Random prompts are sent as text, which a server may tokenize into more tokens.
    max_length = max(1024, 2 * workload.max_length)
    model = job.model(variant)
    if variant.engine == LLAMA_CPP:
        program = str(job.environments.llama_cpp("llama-server"))
        slots = workload.max_sequences
        sizes = ["-c", str(max_length * slots), "-np", str(slots), "-t", str(cores())]
        return [program, "-m", model, "--alias", SERVED_NAME, *where, *sizes], port
    tokens = max_length * workload.max_sequences + SPARE_TOKENS
    sizes = ["--max-model-len", str(max_length), "--max-num-seqs", str(max(16, workload.max_sequences))]
    sizes += ["--kv-cache-memory-bytes", str(tokens * job.subject.kv_bytes_per_token(job.progress))]
    common = ["--served-model-name", SERVED_NAME, *where, *sizes, *variant.flags()]
    if variant.engine == OURS:
        return [str(Path(sys.executable).with_name("vllm-backplane")), "serve", model, *common], port
    # 'vllm serve' does not work here: it requires a distribution named vllm.
    python = job.python(variant)
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *common], port


@contextmanager
def running(command: list[str], variant: Variant, port: int, timeout: float) -> Iterator[int]:
    """Starts a server, waits until it is healthy, yields its process id, and stops it at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment(variant), cwd=scratch, start_new_session=True
            )
        try:
            deadline = time.monotonic() + timeout
            while not is_healthy(port):
                if process.poll() is not None:
                    raise failure_of(process.returncode, log)
                if time.monotonic() > deadline:
                    raise EngineFailure(f"was not healthy within {timeout:.0f} s")
                time.sleep(0.02)
            yield process.pid
        finally:
            stop(process)


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def first_token(port: int, timeout: float) -> None:
    """Sends a request and returns when the first token arrives."""
    body = {
        "model": SERVED_NAME,
        "prompt": "The capital of France is",
        "stream": True,
        "max_tokens": 4,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        for line in response:
            if re.search(rb'"text": ?"[^"]', line):
                return
    raise EngineFailure("the response ended without a token")


def run_client(job: Job, port: int, point: Point) -> dict[str, Any]:
    """Runs `vllm bench serve` and returns its results. Every server is measured with the client of our environment."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai",
            "--base-url", f"http://127.0.0.1:{port}", "--endpoint", "/v1/completions", "--model", SERVED_NAME,
            "--tokenizer", str(job.subject.folder(job.progress)), "--dataset-name", "random",
            # Every run of the client uses other prompts, because servers cache prefixes.
            "--seed", str(round(10 * point.rate)),
            "--random-input-len", str(point.prompt), "--random-output-len", str(point.output), "--ignore-eos",
            "--num-prompts", str(point.requests), "--max-concurrency", str(point.sequences), "--temperature", "0",
            "--request-rate", str(point.rate or "inf"), "--disable-tqdm",
            # llama-server closes idle connections after five seconds, and the client would lose requests sent then.
            "--header", "Connection=close",
            "--save-result", "--save-detailed", "--result-dir", scratch, "--result-filename", "result.json",
        ]  # fmt: skip
        variant = Variant(OURS, "client", 0)
        log = Path(scratch) / "log"
        with log.open("wb") as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, env=environment(variant), timeout=job.timeout, check=False
            )
        result = Path(scratch) / "result.json"
        if done.returncode or not result.exists():
            raise EngineFailure(f"the client ended with status {done.returncode}", log.read_text(errors="replace"))
        found: dict[str, Any] = json.loads(result.read_text())
    if found["completed"] != point.requests:
        errors = "\n".join(error for error in found["errors"] if error)
        raise EngineFailure(f"{found['completed']} of {point.requests} requests were completed", errors)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
