"""Defines the workloads, their points, and the metric of each point."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GENERATE, FORMATS, SERVE, STARTUP, MEMORY = "generate", "formats", "serve", "startup", "memory"


@dataclass(frozen=True, slots=True)
class Point:
    """Describes one configuration that is measured."""

    name: str
    metric: str
    """The name of the figure that is reported; `drivers` explains them."""
    unit: str
    sequences: int = 1
    prompt: int = 0
    """Prompt tokens of each sequence."""
    output: int = 1
    """Output tokens of each sequence."""
    requests: int = 0
    """Number of requests, over HTTP only."""
    rate: float = 0.0
    """Requests per second over HTTP; 0: all at once."""

    def plan(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes a group of points that one engine process measures."""

    name: str
    title: str
    kind: str
    points: tuple[Point, ...]
    lower_is_better: bool = False
    needs_text: bool = False
    """Whether it needs a model with a tokenizer."""

    @property
    def max_length(self) -> int:
        return max(point.prompt + point.output for point in self.points)

    @property
    def max_tokens(self) -> int:
        return max(point.sequences * (point.prompt + point.output) for point in self.points)

    @property
    def max_sequences(self) -> int:
        return max(point.sequences for point in self.points)


DECODE_PROMPT, DECODE_OUTPUT = 32, 32
CONTEXT_OUTPUT = 16
SLOTS = 16


def workloads(sequences: tuple[int, ...], prompts: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[Workload, ...]:
    return (
        Workload(
            "decode",
            f"Decode, tokens/s over all sequences (prompts of {DECODE_PROMPT}, {DECODE_OUTPUT} tokens each)",
            GENERATE,
            tuple(
                Point(f"{n} sequence{'s' * (n > 1)}", "decode", "tokens/s", n, DECODE_PROMPT, DECODE_OUTPUT)
                for n in sequences
            ),
        ),
        Workload(
            "prefill",
            "Prefill of one prompt, tokens/s",
            GENERATE,
            tuple(Point(f"prompt of {n}", "prefill", "tokens/s", 1, n, 1) for n in prompts),
        ),
        Workload(
            "context",
            "Growth with context: ms per decoded token, one sequence",
            GENERATE,
            tuple(
                Point(f"context {n}", "step", "ms", 1, n - CONTEXT_OUTPUT, CONTEXT_OUTPUT) for n in contexts
            ),
            lower_is_better=True,
        ),
        Workload(
            "serve",
            f"Over HTTP (`vllm bench serve`; at most {SLOTS} requests at once, prompts of 128, 64 tokens each)",
            SERVE,
            (
                Point(f"{SLOTS} at a time", "output_throughput", "tokens/s", SLOTS, 128, 64, requests=2 * SLOTS),
                Point("mixed arrival, 2/s", "output_throughput", "tokens/s", SLOTS, 128, 64, 2 * SLOTS, rate=2.0),
                Point("  to first token", "mean_ttft_ms", "ms", SLOTS, 128, 64, 2 * SLOTS, rate=2.0),
                Point("  per token after", "mean_tpot_ms", "ms", SLOTS, 128, 64, 2 * SLOTS, rate=2.0),
            ),
            needs_text=True,
        ),
        Workload(
            "startup",
            "From starting the server to its first token, s, files in the page cache",
            STARTUP,
            (Point("start-up", "first_token", "s", 1, 16, 4),),
            lower_is_better=True,
            needs_text=True,
        ),
        Workload(
            "memory",
            "Peak memory of all processes (PSS) with 16 sequences of 512 + 32 tokens, MiB",
            MEMORY,
            (Point("peak", "pss", "MiB", 16, 512, 32),),
            lower_is_better=True,
        ),
    )  # fmt: skip


FULL = workloads((1, 4, 16, 64), (128, 1024), (128, 512, 2048, 8192))
QUICK = workloads((1, 16), (128,), (128, 1024))
BY_FORMAT = Workload(
    "formats",
    f"GGUF formats: decode (prompts of {DECODE_PROMPT}, {DECODE_OUTPUT} tokens each) and prefill, tokens/s",
    FORMATS,
    (
        Point("1 sequence", "decode", "tokens/s", 1, DECODE_PROMPT, DECODE_OUTPUT),
        Point("16 sequences", "decode", "tokens/s", 16, DECODE_PROMPT, DECODE_OUTPUT),
        Point("prompt of 1024", "prefill", "tokens/s", 1, 1024, 1),
    ),
)
"""The comparison of engines that load GGUF, on the same files. It is measured only if --only names it."""
NAMES = (*(workload.name for workload in FULL), BY_FORMAT.name)
