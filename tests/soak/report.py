"""Judges the record of a run, prints it and draws it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

from tests.soak.run import Record, Sample

GROWTH = 0.02
"""Share by which memory may grow once the KV cache is filled."""
BETWEEN_ENDS = 0.75
"""Share of a run between the middles of its first and its last quarter, whose medians are compared."""
SHOWN = 5
"""Texts of one kind that a finding names."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 860, 150, 80, 20, 40, 46


def findings(record: Record) -> list[str]:
    """Returns a text for each rule that the run broke."""
    found = []
    for what, texts in (("lost", record.tally.lost), ("server errors", record.tally.server_errors)):
        if texts:
            found.append(f"{len(texts)} {what}, such as: {'; '.join(texts[:SHOWN])}")
    if len(set(record.probes)) > 1:
        found.append(f"the greedy probe had {len(set(record.probes))} answers: {sorted(set(record.probes))[:SHOWN]}")
    filled = [sample for sample in record.samples if sample.filled(record.cache_tokens) >= 1]
    if len(filled) < 4:
        found.append(
            f"the KV cache of {record.cache_tokens:,} tokens was filled in {len(filled)} of {len(record.samples)} "
            "samples only, so memory was not compared; send more requests, or choose a smaller cache"
        )
    else:
        first, last = _ends([sample.memory for sample in filled])
        growth = (last / first - 1) / BETWEEN_ENDS
        if growth > GROWTH:
            found.append(f"memory grew by {growth:.1%} after the KV cache was filled (limit {GROWTH:.0%})")
        first, last = _ends([sample.descriptors for sample in filled])
        if last > first:
            found.append(f"open descriptors grew from {first:g} to {last:g}")
    return found


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Returns the medians of the first and of the last quarter."""
    part = max(1, len(values) // 4)
    return median(values[:part]), median(values[-part:])


def line(sample: Sample, record: Record) -> str:
    """Returns one line of progress."""
    filled = sample.filled(record.cache_tokens)
    return (
        f"{sample.requests:6,} requests  {sample.seconds:6.0f} s  {sample.requests_per_second:5.1f} requests/s  "
        f"{sample.memory / 2**20:7,.0f} MiB  {sample.descriptors:4} descriptors  KV cache filled to {filled:4.0%}  "
        f"{len(record.tally.lost)} lost  {len(record.tally.server_errors)} server errors"
    )


def plot(record: Record) -> str:
    """Returns an SVG of memory, descriptors and throughput over the number of requests."""
    panels = (
        ("Memory of all processes (MiB)", [sample.memory / 2**20 for sample in record.samples]),
        ("Open descriptors", [float(sample.descriptors) for sample in record.samples]),
        ("Requests per second", [sample.requests_per_second for sample in record.samples]),
    )
    requests = [sample.requests for sample in record.samples]
    height = TOP + len(panels) * (HEIGHT + GAP)
    title = f"{requests[-1]:,} mixed requests" if requests else "no request"
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15" fill="#222">{escape(title)}</text>',
    ]
    full = next((sample.requests for sample in record.samples if sample.filled(record.cache_tokens) >= 1), None)
    for number, (name, values) in enumerate(panels):
        parts += _panel(name, requests, values, TOP + number * (HEIGHT + GAP), full)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, requests: Sequence[int], values: Sequence[float], top: float, full: int | None) -> list[str]:
    """Returns the elements of one panel, whose scale begins at zero. A line marks where the KV cache was filled."""
    floor, across, highest = top + HEIGHT, WIDTH - LEFT - RIGHT, max([*values, 1e-9]) * 1.1
    last = max(requests, default=1)

    def x(request: float) -> float:
        return LEFT + across * request / last

    parts = [f'<text x="{LEFT}" y="{top - 6}" fill="#222">{escape(name)}</text>']
    for share in (0, 0.5, 1):
        y = floor - HEIGHT * share
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e0e0e0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#222">{highest * share:,.4g}</text>')
    if full is not None:
        parts.append(f'<line x1="{x(full):.1f}" x2="{x(full):.1f}" y1="{top}" y2="{floor}" stroke="#b3541e"/>')
        parts.append(f'<text x="{x(full) + 4:.1f}" y="{top + 12}" fill="#b3541e">KV cache filled</text>')
    path = " ".join(
        f"{x(request):.1f},{floor - HEIGHT * value / highest:.1f}"
        for request, value in zip(requests, values, strict=True)
    )
    parts.append(f'<polyline points="{path}" fill="none" stroke="#0b5cad" stroke-width="2"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{floor + 16}" text-anchor="end" fill="#222">{last:,} requests</text>')
    return parts
