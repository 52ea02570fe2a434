"""Measures the processor time of a server under load by part: the engine's threads, the HTTP server and the client.

    python -m benchmarks.serving                                  # ours in int8 with the default model, 16 at a time
    python -m benchmarks.serving --variant llama.cpp/q8_0 --json

A server is started, and `vllm bench serve` sends it the load of the first point of `make bench ARGS="--only serve"`,
which also defines the variants. The processor time of every thread is added up from the first request to the last
response. Kernel threads that wait for the next kernel count as busy, because they spin.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.compare import drivers, servers, subjects, variants, workloads
from benchmarks.compare.environments import Environments
from benchmarks.compare.machine import cores

INTERVAL = 0.25
"""Seconds between two samples, which take processor time themselves."""
BUSY = 0.2
"""Share of the time from which on a thread counts as a kernel thread."""
ENGINE = "EngineCore"

Thread = tuple[str, int, bool]
"""The role of its process, its number, and whether it is the main thread."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Holds the throughput of a server and its processor time by part."""

    tokens_per_second: float
    seconds: float
    """Time from the first request to the last response."""
    processor_seconds: dict[str, float]


class Sampler:
    """Samples the processor time of all threads of this process's descendants, while it is open."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.samples: list[tuple[float, dict[Thread, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            self.samples.append((time.monotonic(), self._sample()))

    def _sample(self) -> dict[Thread, float]:
        found: dict[Thread, float] = {}
        of_server = {self.server, *(child.pid for child in psutil.Process(self.server).children(recursive=True))}
        for process in psutil.Process(os.getpid()).children(recursive=True):
            try:
                role = "client" if process.pid not in of_server else ENGINE if ENGINE in process.name() else "server"
                for thread in process.threads():
                    found[role, thread.id, thread.id == process.pid] = thread.user_time + thread.system_time
            except psutil.NoSuchProcess:
                continue
        return found


def by_part(samples: list[tuple[float, dict[Thread, float]]], seconds: float) -> dict[str, float]:
    """Returns the processor seconds by part, over the last `seconds` before the server became idle."""

    def server_time(sample: dict[Thread, float]) -> float:
        return sum(used for (role, *_), used in sample.items() if role != "client")

    busy = [
        place for place in range(1, len(samples)) if server_time(samples[place][1]) > server_time(samples[place - 1][1])
    ]
    if not busy:
        raise drivers.EngineFailure(
            f"in {len(samples)} samples the server never took processor time; see its output above"
        )
    end, after = samples[busy[-1]]
    before = next(sample for moment, sample in samples if moment >= end - seconds)
    used = {thread: total - before.get(thread, 0.0) for thread, total in after.items()}
    parts: dict[str, float] = {}
    for (role, _, is_first), spent in sorted(used.items(), key=lambda one: -one[1]):
        part = role
        if role == ENGINE:
            kind = "other kernel threads" if spent > BUSY * seconds else "rest"
            part = f"engine, {'main thread' if is_first else kind}"
        parts[part] = parts.get(part, 0.0) + spent
    return parts


def measured(variant: str, model: str, timeout: float) -> Profile:
    [workload] = [workload for workload in workloads.FULL if workload.kind == workloads.SERVE]
    point, chosen = workload.points[0], variants.find(variant)
    root = Path(__file__).resolve().parents[1]
    job = drivers.Job(subjects.find(model), Environments(root), 1, timeout, lambda text: print(text, file=sys.stderr))
    command, port = servers.server_command(job, workload, chosen)
    with servers.running(command, chosen, port, timeout) as server:
        servers.first_token(port, timeout)
        with Sampler(server) as sampler:
            result = servers.run_client(job, port, point)
    return Profile(result[point.metric], result["duration"], by_part(sampler.samples, result["duration"]))


def table(profile: Profile) -> str:
    whole = cores() * profile.seconds
    rows = [*profile.processor_seconds.items()]
    rows.append(("idle, or other programs", whole - sum(profile.processor_seconds.values())))
    lines = [f"{profile.tokens_per_second:.0f} tokens/s, {profile.seconds:.1f} s on {cores()} cores", ""]
    lines += ["| part | processor seconds | share |", "| --- | ---: | ---: |"]
    lines += [f"| {part} | {spent:.1f} | {100 * spent / whole:.0f} % |" for part, spent in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="ours/int8", help="a variant of `make bench` (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help=", ".join(subject.name for subject in subjects.ALL))
    parser.add_argument("--timeout", type=float, default=900, help="seconds (default: %(default)g)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        profile = measured(args.variant, args.model, args.timeout)
    except (ValueError, drivers.EngineFailure) as fault:
        raise SystemExit(f"error: {fault}") from None
    print(json.dumps(asdict(profile), indent=1) if args.json else table(profile))


if __name__ == "__main__":
    main()
