"""Makes Markdown tables of medians with their range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.compare.samples import Key, Summary
from benchmarks.compare.targets import Verdict
from benchmarks.compare.variants import VARIANTS
from benchmarks.compare.workloads import Workload


def number(value: float) -> str:
    """Formats a value with about three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    if summary.count == 1:
        return number(summary.median)
    return f"{number(summary.median)} ({number(summary.least)} to {number(summary.most)})"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ordered(names: Iterable[str]) -> list[str]:
    """Returns the variants in the order of `VARIANTS`."""
    places = {variant.name: place for place, variant in enumerate(VARIANTS)}
    return sorted(set(names), key=lambda name: places.get(name, len(places)))


def comparison(model: str, workload: Workload, found: Mapping[Key, Summary]) -> str:
    """Returns the table of a workload for a model, or an empty string if nothing was measured.

    Variants are rows, because there are more variants than points.
    """
    here = {key: value for key, value in found.items() if key[0] == model and key[1] == workload.name}
    if not here:
        return ""
    points = [point for point in workload.points if any(key[2] == point.name for key in here)]
    rows = [
        [variant, *(cell(here.get((model, workload.name, point.name, variant))) for point in points)]
        for variant in ordered(key[3] for key in here)
    ]
    return markdown(["engine", *(f"{point.name.strip()}, {point.unit}" for point in points)], rows)


def verdicts(found: Sequence[Verdict], page: str) -> str:
    """Returns the table of targets. `page` is the link to docs/internals/targets.md from the page of the table."""
    holds = {True: "yes", False: "**no**: [why]({})", None: "not measured"}
    rows = [[v.what, v.needed, v.measured, holds[v.holds].format(f"{page}#{v.reason}")] for v in found]
    return markdown(["target", "needed", "measured", "met"], rows)
