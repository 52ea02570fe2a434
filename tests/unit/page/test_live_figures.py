"""Tests which figures the page gets from a registry of Prometheus, and what it gets where metrics are switched off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from vllm_backplane.page import live_figures
from vllm_backplane.page.live_figures import LiveFigures, RankMemory, Value, sample_of


def values(registry: CollectorRegistry) -> list[Value]:
    return [(one.name, one.labels, one.value) for metric in registry.collect() for one in metric.samples]


@pytest.fixture
def registry() -> CollectorRegistry:
    """Returns a registry with the metrics of two replicas, under the names that vLLM declares."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    amounts = {"num_requests_running": 2, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.5}
    for name, amount in amounts.items():
        gauge = Gauge(f"vllm:{name}", name, labels, registry=registry)
        gauge.labels("m", "0").set(amount)
        gauge.labels("m", "1").set(0)
    for name in ("generation_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"):
        counter = Counter(f"vllm:{name}", name, labels, registry=registry)
        counter.labels("m", "0").inc(10)
        counter.labels("m", "1").inc(32)
    return registry


def test_figures_of_replicas_are_added_up(registry: CollectorRegistry) -> None:
    found = sample_of(values(registry), 7.0)
    assert found.at == 7.0
    assert found.requests is not None
    assert (found.requests.running, found.requests.waiting) == (2, 5)
    assert found.requests.kv_cache_usage == 0.25, "the mean of the replicas"
    assert found.requests.generated_tokens == found.requests.prompt_tokens == 42
    assert found.requests.prefix_queries == found.requests.prefix_hits == 42
    assert found.memory == [] and found.steps is None


def test_vllm_declares_the_metrics_under_these_names() -> None:
    """Tests the names against the source of vLLM: a metric that is not found would show as zero."""
    from inspect import getsource

    from vllm.v1.metrics import loggers

    source = getsource(loggers)
    for name in live_figures.NAMES:
        if name.startswith("vllm:"):
            assert f'name="{name.removesuffix("_total")}"' in source


def test_what_is_switched_off_is_not_zero() -> None:
    found = sample_of([("python_info", {}, 1.0)], 0.0)
    assert found.requests is None and found.steps is None and found.memory == []


def test_step_time_and_memory_of_ranks(registry: CollectorRegistry) -> None:
    memory = Gauge("backplane:device_memory_bytes", "m", ["rank", "kind"], registry=registry)
    seconds = Counter("backplane:step_seconds", "s", ["rank", "part"], registry=registry)
    steps = Counter("backplane:steps", "n", ["rank", "mode", "reason"], registry=registry)
    for rank in ("10", "2"):
        memory.labels(rank, "total").set(100)
        memory.labels(rank, "used").set(40)
        for part, value in (("inputs", 0.2), ("forward", 3.0), ("sample", 0.4)):
            seconds.labels(rank, part).inc(value)
        steps.labels(rank, "replayed", "").inc(6)
        steps.labels(rank, "eager", "prefill").inc(3)
        steps.labels(rank, "eager", "the guard is on").inc(1)
    seconds.labels("2", "schedule").inc(0.1)  # under the first rank of an engine
    memory.labels("2", "peak").set(60)
    found = sample_of(values(registry), 0.0)
    assert found.memory == [RankMemory("2", 100, 40, 60), RankMemory("10", 100, 40, None)]
    assert found.steps is not None
    assert found.steps.seconds == pytest.approx({"schedule": 0.1, "inputs": 0.4, "forward": 6.0, "sample": 0.8})
    assert list(found.steps.seconds) == list(live_figures.PARTS)
    assert (found.steps.count, found.steps.replayed, found.steps.scheduled) == (20, 12, 10)
    assert found.steps.eager == {"prefill": 6, "the guard is on": 2}


def test_several_pages_share_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def read() -> Iterable[Value]:
        nonlocal reads
        reads += 1
        return ()

    async def poll() -> int:
        figures = LiveFigures(read)
        samples = await asyncio.gather(*(figures.sample() for _ in range(5)))
        assert len({sample.at for sample in samples}) == 1
        return reads

    monkeypatch.setattr(live_figures, "SAMPLE_SECONDS", 3600.0)
    assert asyncio.run(poll()) == 1
    monkeypatch.setattr(live_figures, "SAMPLE_SECONDS", 0.0)
    figures = LiveFigures(read)
    asyncio.run(figures.sample())
    asyncio.run(figures.sample())
    assert reads == 3
