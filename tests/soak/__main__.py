"""Starts a server with the default model, sends it mixed requests for a long time, and reports what changed.

The exit status is 1 if a request was lost, the server answered with an error of its own, the answer to a fixed request
changed, or memory or descriptors grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.soak import report
from tests.soak.run import Record, soak

START_SECONDS = 600
KV_CACHE_BYTES = 2 << 30


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="make soak ARGS=…", description=__doc__)
    parser.add_argument("--requests", type=_positive, default=10_000, help="number of requests (default: 10,000)")
    parser.add_argument("--concurrency", type=_positive, default=16, help="requests at a time (default: 16)")
    parser.add_argument("--stretches", type=_positive, default=50, help="samples of memory (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    parser.add_argument("--model", default="smollm2", help="model to serve (default: smollm2)")
    parser.add_argument("--output", type=Path, default=Path("build/soak"), help="folder of the results")
    parser.add_argument("options", nargs="*", help="options of the server, after --")
    given = parser.parse_args()
    if given.stretches > given.requests:
        parser.error(f"--stretches {given.stretches} is more than --requests {given.requests}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is ended
    given.output.mkdir(parents=True, exist_ok=True)
    log = given.output / "server.log"
    print(f"==> starting the server; its log is {log}", flush=True)
    with _server(given.model, given.options, log) as (address, pid):
        print(f"==> {given.requests:,} requests, {given.concurrency} at a time", flush=True)
        record = soak(address, pid, given.requests, given.concurrency, given.stretches, _print_last, given.seed)
    broken = report.findings(record)
    results = given.output / "soak.json"
    results.write_text(json.dumps({**record.as_json(), "findings": broken}, indent=1) + "\n")
    (given.output / "soak.svg").write_text(report.plot(record))
    for text in broken:
        print(f"FAILED: {text}")
    print(f"==> {'failed' if broken else 'passed'}; see {results} and {given.output / 'soak.svg'}")
    return 1 if broken else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _print_last(record: Record) -> None:
    print(report.line(record.samples[-1], record), flush=True)


@contextlib.contextmanager
def _server(model: str, options: list[str], log: Path) -> Iterator[tuple[str, int]]:
    """Starts a server, and yields its address and process id when it is ready. Ends it afterwards."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm-backplane")), "serve", model, "--port", str(port)]
    # The KV cache must be filled early in the run, whatever memory the machine has.
    command += ["--served-model-name", "soak", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, address, log)
        yield address, process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    with httpx.Client(base_url=address, trust_env=False) as client:
        while time.monotonic() < end:
            if process.poll() is not None:
                sys.exit(f"the server ended with status {process.returncode}; see {log}")
            try:
                if client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
    sys.exit(f"the server was not ready after {START_SECONDS} s; see {log}")


if __name__ == "__main__":
    sys.exit(main())
