"""Where the time from `vllm-backplane serve` to the first token goes, by what the server's log says when.

    python -m benchmarks.startup                    # the default model
    python -m benchmarks.startup --rounds 5 -- smollm2-fp32 --quantization int8

Each round is a new server on the loopback interface; files are in the page cache after the first, which is not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare.servers import SERVED_NAME, first_token, free_port

PHASES = {
    "imports: Python, PyTorch, vLLM's server": "non-default args:",
    "configuration, and the engine's process (forked: it imports nothing again)": "Initializing a V1 LLM engine",
    "device, distributed set-up": "Starting to load model",
    "weights": "Model loading took",
    "largest step, KV cache, warm-up": r"init engine \(profile",
    "tokenizer, routes, HTTP": "Application startup complete",
}
"""What a phase is, and the line of the log that ends it."""
FIRST_TOKEN = "first token"
COMMAND = Path(sys.executable).parent / "vllm-backplane"
LONGEST = 300


def seconds_by_phase(arguments: list[str]) -> dict[str, float]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [str(COMMAND), "serve", *arguments, "--served-model-name", SERVED_NAME, "--port", str(port)]
        began = time.monotonic()
        with log.open("w") as written:
            server = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
            try:
                return _watched(log, server, began, port)
            finally:
                server.terminate()
                server.wait()


def _watched(log: Path, server: subprocess.Popen[bytes], began: float, port: int) -> dict[str, float]:
    waiting, found, last = dict(PHASES), {}, began
    while waiting:
        if server.poll() is not None or time.monotonic() - began > LONGEST:
            raise SystemExit(f"the server did not come up:\n{log.read_text()[-2000:]}")
        title, line = next(iter(waiting.items()))
        if re.search(line, log.read_text()):
            found[title], last = time.monotonic() - last, time.monotonic()
            del waiting[title]
        else:
            time.sleep(0.01)
    first_token(port, LONGEST)
    found[FIRST_TOKEN] = time.monotonic() - last
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("arguments", nargs="*", help="for 'vllm-backplane serve', after --")
    args = parser.parse_args()
    seconds_by_phase(args.arguments)
    rounds = [seconds_by_phase(args.arguments) for _ in range(args.rounds)]
    medians = {title: statistics.median(one[title] for one in rounds) for title in (*PHASES, FIRST_TOKEN)}
    whole = statistics.median(sum(one.values()) for one in rounds)
    if args.json:
        print(json.dumps({"phases": medians, "whole": whole}, indent=1))
        return
    print(f"\n| phase | seconds, median of {args.rounds} |\n| --- | ---: |")
    for title, seconds in medians.items():
        print(f"| {title} | {seconds:.2f} |")
    print(f"| all | {whole:.2f} |")


if __name__ == "__main__":
    main()
