"""Whose processor time a server under load takes: the engine's threads, the HTTP server, the client.

    python -m benchmarks.serving                                  # ours in int8 with the default model, 16 at a time
    python -m benchmarks.serving --variant llama.cpp/q8_0 --json

A server is started and `vllm bench serve` asks it for what the first point of `make bench ARGS="--only serve"` asks
for; a variant is one of those. From the first request to the last answer, the processor time of every thread is added
up. A thread of the kernels that waits for the next one counts as busy: it does not sleep.
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

EVERY = 0.25
"""Seconds between two looks, which take processor time themselves."""
BUSY = 0.2
"""Of the time: a thread with less is none of those that compute."""
ENGINE = "EngineCore"

Thread = tuple[str, int, bool]
"""The process it belongs to, its number, and whether it is the process's first."""


@dataclass(frozen=True, slots=True)
class Profile:
    tokens_per_second: float
    seconds: float
    """From the first request to the last answer."""
    processor_seconds: dict[str, float]


class Watch:
    """Looks at the threads of this process's descendants until it is ended."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.looks: list[tuple[float, dict[Thread, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(EVERY):
            self.looks.append((time.monotonic(), self._look()))

    def _look(self) -> dict[Thread, float]:
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


def divided(looks: list[tuple[float, dict[Thread, float]]], seconds: float) -> dict[str, float]:
    """Processor seconds by part, over the last `seconds` in which the server or its engine did something."""

    def served(look: dict[Thread, float]) -> float:
        return sum(used for (role, *_), used in look.items() if role != "client")

    busy = [place for place in range(1, len(looks)) if served(looks[place][1]) > served(looks[place - 1][1])]
    if not busy:
        raise drivers.EngineFailure(f"in {len(looks)} looks the server was never seen to work; see what it says above")
    end, after = looks[busy[-1]]
    before = next(look for moment, look in looks if moment >= end - seconds)
    used = {thread: total - before.get(thread, 0.0) for thread, total in after.items()}
    parts: dict[str, float] = {}
    for (role, _, is_first), spent in sorted(used.items(), key=lambda one: -one[1]):
        part = role
        if role == ENGINE:
            computes = "other threads of kernels" if spent > BUSY * seconds else "rest"
            part = f"engine, {'first thread' if is_first else computes}"
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
        with Watch(server) as watch:
            result = servers.ask(job, port, point)
    return Profile(result[point.metric], result["duration"], divided(watch.looks, result["duration"]))


def table(profile: Profile) -> str:
    whole = cores() * profile.seconds
    rows = [*profile.processor_seconds.items()]
    rows.append(("idle, or others", whole - sum(profile.processor_seconds.values())))
    lines = [f"{profile.tokens_per_second:.0f} tokens/s, {profile.seconds:.1f} s on {cores()} cores", ""]
    lines += ["| part | processor seconds | share |", "| --- | ---: | ---: |"]
    lines += [f"| {part} | {spent:.1f} | {100 * spent / whole:.0f} % |" for part, spent in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="ours/int8", help="of `make bench` (default: %(default)s)")
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
