"""What is measured: workloads, their points, and what the number of each means."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GENERATE, FORMATS, SERVE, STARTUP, MEMORY = "generate", "formats", "serve", "startup", "memory"


@dataclass(frozen=True, slots=True)
class Point:
    """One measured situation."""

    name: str
    metric: str
    """Which figure of a measurement counts: see `drivers` for what each gives."""
    unit: str
    sequences: int = 1
    prompt: int = 0
    answer: int = 1
    requests: int = 0
    """Over HTTP only."""
    rate: float = 0.0
    """Requests per second over HTTP; 0: all at once."""

    def plan(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    kind: str
    points: tuple[Point, ...]
    lower_is_better: bool = False
    needs_text: bool = False
    """Only on models with a tokenizer."""

    @property
    def longest(self) -> int:
        return max(point.prompt + point.answer for point in self.points)

    @property
    def most_tokens(self) -> int:
        return max(point.sequences * (point.prompt + point.answer) for point in self.points)

    @property
    def most_sequences(self) -> int:
        return max(point.sequences for point in self.points)


DECODE_PROMPT, DECODE_ANSWER = 32, 32
CONTEXT_ANSWER = 16
SLOTS = 16


def workloads(sequences: tuple[int, ...], prompts: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[Workload, ...]:
    return (
        Workload(
            "decode",
            f"Decoding, tokens/s over all sequences (prompts of {DECODE_PROMPT}, {DECODE_ANSWER} tokens each)",
            GENERATE,
            tuple(
                Point(f"{n} sequence{'s' * (n > 1)}", "decode", "tokens/s", n, DECODE_PROMPT, DECODE_ANSWER)
                for n in sequences
            ),
        ),
        Workload(
            "prefill",
            "Reading one prompt, tokens/s",
            GENERATE,
            tuple(Point(f"prompt of {n}", "prefill", "tokens/s", 1, n, 1) for n in prompts),
        ),
        Workload(
            "context",
            "Growth with context: ms per decoded token, one sequence",
            GENERATE,
            tuple(
                Point(f"context {n}", "step", "ms", 1, n - CONTEXT_ANSWER, CONTEXT_ANSWER) for n in contexts
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
    f"GGUF formats: decoding (prompts of {DECODE_PROMPT}, {DECODE_ANSWER} tokens each) and reading a prompt, tokens/s",
    FORMATS,
    (
        Point("1 sequence", "decode", "tokens/s", 1, DECODE_PROMPT, DECODE_ANSWER),
        Point("16 sequences", "decode", "tokens/s", 16, DECODE_PROMPT, DECODE_ANSWER),
        Point("prompt of 1024", "prefill", "tokens/s", 1, 1024, 1),
    ),
)
"""Of engines that load GGUF, each on the same file. Measured where it is asked for."""
NAMES = (*(workload.name for workload in FULL), BY_FORMAT.name)
