"""Measures the phases from `vllm-backplane serve` to the first token, by the times of lines in the server's log.

    python -m benchmarks.startup                    # the default model
    python -m benchmarks.startup --rounds 5 -- smollm2-fp32 --quantization int8
    python -m benchmarks.startup --against smollm2-fp32   # the default model compared with its float32 weights

Each round starts a new server on the loopback interface. The first round is not counted; after it, files are in the
page cache. With --against, whose value is one word with all arguments, the two servers are started in turns.
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
from pathlib import Path
from typing import Any

from benchmarks.compare.servers import SERVED_NAME, first_token, free_port

PHASES = {
    "imports: Python, PyTorch, vLLM's server": "non-default args:",
    "configuration, fork of the engine process (no imports)": "Initializing a V1 LLM engine",
    "device, distributed set-up": "Starting to load model",
    "weights": "Model loading took",
    "profile run, KV cache, warm-up": r"init engine \(profile",
    "tokenizer, routes, HTTP": "Application startup complete",
}
"""Phases, with the line of the log that ends each."""
FIRST_TOKEN = "first token"
COMMAND = Path(sys.executable).parent / "vllm-backplane"
TIMEOUT = 300


def seconds_by_phase(arguments: list[str]) -> dict[str, float]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [str(COMMAND), "serve", *arguments, "--served-model-name", SERVED_NAME, "--port", str(port)]
        began = time.monotonic()
        with log.open("w") as written:
            server = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
            try:
                return _follow_log(log, server, began, port)
            finally:
                server.terminate()
                server.wait()


def _follow_log(log: Path, server: subprocess.Popen[bytes], began: float, port: int) -> dict[str, float]:
    waiting, found, last = dict(PHASES), {}, began
    while waiting:
        if server.poll() is not None or time.monotonic() - began > TIMEOUT:
            raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
        title, line = next(iter(waiting.items()))
        if re.search(line, log.read_text()):
            found[title], last = time.monotonic() - last, time.monotonic()
            del waiting[title]
        else:
            time.sleep(0.01)
    first_token(port, TIMEOUT)
    found[FIRST_TOKEN] = time.monotonic() - last
    return found


def measured(servers: list[list[str]], rounds: int) -> list[dict[str, Any]]:
    """Returns the median times of each server. Servers take turns, so that other load affects all of them."""
    taken: list[list[dict[str, float]]] = [[] for _ in servers]
    for number in range(rounds + 1):
        for arguments, own in zip(servers, taken, strict=True):
            found = seconds_by_phase(arguments)
            if number > 0:
                own.append(found)
    return [
        {
            "arguments": arguments,
            "phases": {title: statistics.median(one[title] for one in own) for title in (*PHASES, FIRST_TOKEN)},
            "whole": statistics.median(sum(one.values()) for one in own),
        }
        for arguments, own in zip(servers, taken, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--against", metavar="ARGUMENTS", type=shlex.split, help="arguments of a second server, as one word"
    )
    parser.add_argument("arguments", nargs="*", help="arguments of 'vllm-backplane serve', after --")
    args = parser.parse_args()
    servers = [args.arguments] if args.against is None else [args.arguments, args.against]
    found = measured(servers, args.rounds)
    if args.json:
        print(json.dumps(found if args.against is not None else found[0], indent=1))
        return
    columns = [f"{shlex.join(one['arguments']) or 'the default model'}, s" for one in found]
    print(f"\n| phase, median of {args.rounds} | {' | '.join(columns)} |\n| --- |{' ---: |' * len(found)}")
    for title in (*PHASES, FIRST_TOKEN):
        print(f"| {title} | {' | '.join(format(one['phases'][title], '.2f') for one in found)} |")
    print(f"| all | {' | '.join(format(one['whole'], '.2f') for one in found)} |")


if __name__ == "__main__":
    main()
