"""Reads the figures of a running server from the metrics that vLLM and Backplane keep for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

SAMPLE_SECONDS = 0.5
"""Seconds for which a sample serves all requests: several pages may be open."""

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_CACHE = "vllm:kv_cache_usage_perc"
GENERATED, PROMPTS = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
MEMORY = "backplane:device_memory_bytes"
PART_SECONDS, STEPS = "backplane:step_seconds_total", "backplane:steps_total"
NAMES = frozenset({RUNNING, WAITING, KV_CACHE, GENERATED, PROMPTS, QUERIES, HITS, MEMORY, PART_SECONDS, STEPS})
SCHEDULE = "schedule"
PARTS = (SCHEDULE, "inputs", "forward", "sample")
"""Parts of a step, in their order."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Holds vLLM's figures. Counts of tokens are totals since the start."""

    running: float
    waiting: float
    kv_cache_usage: float
    """Share of the KV cache that is in use, the mean of all replicas."""
    generated_tokens: float
    prompt_tokens: float
    prefix_queries: float
    prefix_hits: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Holds the memory of one rank's card in bytes."""

    rank: str
    total: float | None
    used: float | None
    peak: float | None


@dataclass(frozen=True, slots=True)
class Steps:
    """Holds the time of all steps so far, of all ranks together."""

    seconds: dict[str, float]
    """By part."""
    count: float
    replayed: float
    eager: dict[str, float]
    """Number of steps by the reason why no graph was replayed."""
    scheduled: float
    """Steps of the ranks that stand for the scheduler of their engine."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds all figures of one moment. What is None has no metrics: they are switched off."""

    at: float
    """Seconds of a monotonic clock."""
    requests: Requests | None = None
    memory: list[RankMemory] = field(default_factory=list)
    steps: Steps | None = None


Value = tuple[str, dict[str, str], float]
"""Name, labels and value of a sample of Prometheus."""


def sample_of(values: Iterable[Value], at: float) -> Sample:
    """Returns the figures that are in the samples of a registry."""
    found: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for name, labels, value in values:
        if name in NAMES:
            found[name].append((labels, value))
    return Sample(at, _requests(found), _memory(found[MEMORY]), _steps(found))


def _requests(found: dict[str, list[tuple[dict[str, str], float]]]) -> Requests | None:
    if not found[RUNNING]:
        return None
    total = {name: sum(value for _labels, value in found[name]) for name in NAMES}
    usage = total[KV_CACHE] / len(found[KV_CACHE]) if found[KV_CACHE] else 0.0
    return Requests(
        total[RUNNING], total[WAITING], usage, total[GENERATED], total[PROMPTS], total[QUERIES], total[HITS]
    )


def _memory(values: list[tuple[dict[str, str], float]]) -> list[RankMemory]:
    by_rank: dict[str, dict[str, float]] = defaultdict(dict)
    for labels, value in values:
        by_rank[labels.get("rank", "")][labels.get("kind", "")] = value
    ranks = sorted(by_rank, key=lambda rank: (len(rank), rank))
    return [RankMemory(rank, *(by_rank[rank].get(kind) for kind in ("total", "used", "peak"))) for rank in ranks]


def _steps(found: dict[str, list[tuple[dict[str, str], float]]]) -> Steps | None:
    if not found[PART_SECONDS]:
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    schedulers = set()
    for labels, value in found[PART_SECONDS]:
        part = labels.get("part", "")
        seconds[part] = seconds.get(part, 0.0) + value
        if part == SCHEDULE:
            schedulers.add(labels.get("rank"))
    count = replayed = scheduled = 0.0
    eager: dict[str, float] = defaultdict(float)
    for labels, value in found[STEPS]:
        count += value
        scheduled += value if labels.get("rank") in schedulers else 0.0
        if labels.get("mode") == "replayed":
            replayed += value
        else:
            eager[labels.get("reason", "")] += value
    return Steps(seconds, count, replayed, dict(eager), scheduled)


def read_registry() -> list[Value]:
    """Returns the samples of vLLM's registry in this process, or of all API servers if there are several."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    registry: Any = get_prometheus_registry()
    return [(one.name, one.labels, one.value) for metric in registry.collect() for one in metric.samples]


class LiveFigures:
    """Takes samples, at most one at a time, outside of the event loop: several API servers share files."""

    def __init__(self, read: Callable[[], Iterable[Value]] = read_registry) -> None:
        self._read = read
        self._last: Sample | None = None
        self._lock = asyncio.Lock()

    async def sample(self) -> Sample:
        """Returns the last sample, or a new one if that is too old."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last.at >= SAMPLE_SECONDS:
                values = await asyncio.to_thread(self._read)
                self._last = sample_of(values, time.monotonic())
            return self._last
