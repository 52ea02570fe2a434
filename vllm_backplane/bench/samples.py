"""Defines what is measured, and the summary of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """Describes one configuration that is measured: sequences that are generated together."""

    name: str
    sequences: int
    prompt: int
    """Prompt tokens of each sequence."""
    output: int
    """Output tokens of each sequence."""

    @property
    def is_decode(self) -> bool:
        return self.output > 1

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


DECODE_PROMPT, DECODE_OUTPUT = 32, 64
LEAST_OUTPUT = 8
"""Output tokens of the decode points on a machine that is too slow for more."""
SHORT, LONG = 128, 1024
PREFILL = tuple(Point(f"prefill, prompt of {tokens}", 1, tokens, 1) for tokens in (SHORT, LONG))
DECODE = tuple(
    Point(f"decode, {count} sequence{'s' * (count > 1)}", count, DECODE_PROMPT, DECODE_OUTPUT) for count in (1, 4, 16)
)
FIRST_TOKEN = f"time to first token, prompt of {SHORT}"


@dataclass(frozen=True, slots=True)
class Summary:
    """Holds the median and the range of repeated measurements."""

    median: float
    least: float
    most: float
    times: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(statistics.median(values), min(values), max(values), len(values))
