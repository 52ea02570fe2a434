"""Defines samples and their summaries: median, range and spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds one measured value."""

    model: str
    workload: str
    point: str
    variant: str
    round: int
    value: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Holds the median and the range of some samples."""

    median: float
    least: float
    most: float
    count: int

    @property
    def spread(self) -> float:
        """Returns the range as a share of the median."""
        return (self.most - self.least) / self.median if self.median else 0.0


def summarize(values: Sequence[float]) -> Summary:
    if not values:
        raise ValueError("no samples to summarize")
    return Summary(statistics.median(values), min(values), max(values), len(values))


Key = tuple[str, str, str, str]


def grouped(samples: Iterable[Sample]) -> dict[Key, Summary]:
    """Returns the summaries of samples by (model, workload, point, variant)."""
    values: dict[Key, list[float]] = {}
    for sample in samples:
        values.setdefault((sample.model, sample.workload, sample.point, sample.variant), []).append(sample.value)
    return {key: summarize(found) for key, found in values.items()}
