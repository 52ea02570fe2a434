"""Declares Backplane's metrics: names, kinds and labels. docs/serve/metrics.md describes them for users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """Describes one metric. The name of a counter ends in `_total`."""

    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...]


Series = tuple[str, tuple[str, ...]]
"""A metric's name, and the values of its labels."""

MEMORY = "backplane:device_memory_bytes"
STEP_SECONDS = "backplane:step_seconds_total"
STEPS = "backplane:steps_total"
GRAPHS = "backplane:graphs_captured"
OPERATOR_SECONDS = "backplane:operator_seconds_total"
SAMPLED_STEPS = "backplane:operator_sampled_steps_total"
CARD_ERRORS = "backplane:card_errors_total"

METRICS: Mapping[str, Metric] = {
    MEMORY: Metric(
        "gauge",
        "Memory of the card: its total, what all processes use, and the highest use by the worker.",
        ("rank", "kind"),
    ),
    STEP_SECONDS: Metric("counter", "Host time of steps, by part.", ("rank", "part")),
    STEPS: Metric(
        "counter", "Steps by mode: replayed from a graph, or eager for the given reason.", ("rank", "mode", "reason")
    ),
    GRAPHS: Metric("gauge", "Graphs of decode steps that the worker has captured.", ("rank",)),
    OPERATOR_SECONDS: Metric("counter", "Time of operators in sampled steps.", ("rank", "operator")),
    SAMPLED_STEPS: Metric("counter", "Steps in which the time of operators was measured.", ("rank",)),
    CARD_ERRORS: Metric("counter", "Errors of the card that operations of the worker raised.", ("rank",)),
}

SCHEDULE, INPUTS, FORWARD, SAMPLE = "schedule", "inputs", "forward", "sample"
PARTS = (SCHEDULE, INPUTS, FORWARD, SAMPLE)
"""Parts of a step, in their order."""
