"""Runs the load in stretches. After each, when no request is in flight, memory and descriptors of the server are read.

A greedy request with a known prompt is repeated during each stretch and after it: its answer must never change.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import psutil

from tests.soak.load import Load, Tally

PROBE = "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is"
PROBE_TOKENS = 16
LONGEST = 256
"""Words of the longest prompts, or less if the model's context is short. With longer ones, 10,000 requests would take
hours on two cores."""


@dataclass(frozen=True)
class Sample:
    """Describes the server after a stretch, when it is idle."""

    requests: int
    """Requests sent so far."""
    seconds: float
    memory: int
    """Proportional set size of all processes of the server, in bytes."""
    descriptors: int
    tokens_computed: int
    """Prompt tokens without those of the prefix cache, and generated tokens, since the server started."""
    requests_per_second: float
    """In this stretch."""

    def filled(self, cache_tokens: int) -> float:
        """Returns an estimate of the share of the KV cache that was written at least once. vLLM reuses blocks that are
        not full first, and counts the whole prompts of aborted requests, so half as many tokens more are required."""
        return min(1.0, self.tokens_computed / (1.5 * cache_tokens))


@dataclass
class Record:
    """Holds what a run showed."""

    cache_tokens: int
    """Tokens that the KV cache holds."""
    samples: list[Sample] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    """The answer to each probe."""
    tally: Tally = field(default_factory=Tally)

    def as_json(self) -> dict[str, Any]:
        """Returns the record for a JSON file."""
        found = asdict(self)
        found["tally"]["sent"] = dict(self.tally.sent)
        found["tally"]["statuses"] = {str(status): number for status, number in sorted(self.tally.statuses.items())}
        latencies = sorted(found["tally"].pop("latencies"))
        shares = {"median": 0.5, "99 %": 0.99}
        found["latency"] = {
            name: latencies[int(share * (len(latencies) - 1))] for name, share in shares.items() if latencies
        }
        return found


def soak(
    address: str, pid: int, requests: int, concurrency: int, stretches: int, report: Callable[[Record], None], seed: int
) -> Record:
    """Sends `requests` to the server at `address`, whose first process is `pid`, and returns what was observed.

    `report` is called after each stretch. The served model must have the name "soak".
    """
    return asyncio.run(_soak(address, pid, requests, concurrency, stretches, report, seed))


async def _soak(
    address: str, pid: int, requests: int, concurrency: int, stretches: int, report: Callable[[Record], None], seed: int
) -> Record:
    # A connection that is kept for the next probe would expire on both sides at the same time.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False, limits=limits) as client:
        [card] = (await client.get("/v1/models")).json()["data"]
        record = Record(_cache_tokens(await _metrics(client)))
        load = Load(address, min(LONGEST, card["max_model_len"] // 4), seed)
        record.tally = load.tally
        record.probes.append(await _probe(client))  # it also makes what exists once per server: threads, connections
        started = time.monotonic()
        sent = 0
        for stretch in range(1, stretches + 1):
            number = requests * stretch // stretches - sent
            before = time.monotonic()
            loading = asyncio.create_task(load.send(number, concurrency))
            try:
                record.probes.append(await _probe(client))
                await loading
                sent += number
                rate = number / (time.monotonic() - before)
                record.probes.append(await _probe(client))
                await _wait_until_idle(client)
                memory, descriptors = _resources(pid)
                computed = _computed_tokens(await _metrics(client))
            except (httpx.HTTPError, psutil.Error, TimeoutError) as error:  # the server has ended, or hangs
                loading.cancel()
                record.tally.lost.append(f"the run ended: {type(error).__name__}: {error}")
                return record
            record.samples.append(Sample(sent, time.monotonic() - started, memory, descriptors, computed, rate))
            report(record)
    return record


async def _probe(client: httpx.AsyncClient) -> str:
    body = {"model": "soak", "prompt": PROBE, "max_tokens": PROBE_TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text[:200]}"
    return str(response.json()["choices"][0]["text"])


async def _metrics(client: httpx.AsyncClient) -> str:
    response = await client.get("/metrics")
    response.raise_for_status()
    return response.text


def _value(metrics: str, name: str) -> float:
    """Returns the sum of a Prometheus metric over its labels."""
    return sum(
        float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^\n]*}})? (\S+)$", metrics, re.MULTILINE)
    )


def _computed_tokens(metrics: str) -> int:
    prompts = _value(metrics, "vllm:prompt_tokens_total") - _value(metrics, "vllm:prefix_cache_hits_total")
    return int(prompts + _value(metrics, "vllm:generation_tokens_total"))


def _cache_tokens(metrics: str) -> int:
    [described] = re.findall(r"^vllm:cache_config_info{([^\n]*)}", metrics, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', described))
    return int(labels["num_gpu_blocks"]) * int(labels["block_size"])


async def _wait_until_idle(client: httpx.AsyncClient) -> None:
    """Waits until no request is running or waiting. Aborted requests end a moment after their connection."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        metrics = await _metrics(client)
        if not _value(metrics, "vllm:num_requests_running") and not _value(metrics, "vllm:num_requests_waiting"):
            await asyncio.sleep(0.5)
            return
        await asyncio.sleep(0.2)
    raise TimeoutError("requests are still running or waiting 60 s after the last one was sent")


def _resources(pid: int) -> tuple[int, int]:
    """Returns memory and open descriptors of a process and its descendants."""
    first = psutil.Process(pid)
    memory = descriptors = 0
    for process in (first, *first.children(recursive=True)):
        memory += process.memory_full_info().pss
        descriptors += process.num_fds()
    return memory, descriptors
