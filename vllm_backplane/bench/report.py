"""Derives the report of `vllm-backplane bench`: figures, share of the memory bandwidth, reliability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_backplane.bench.other_load import BUSY
from vllm_backplane.bench.samples import DECODE, FIRST_TOKEN, PREFILL, Summary

BANDWIDTH = "memory, reading"


@dataclass(frozen=True, slots=True)
class Figure:
    """Holds one row of the table."""

    name: str
    unit: str
    summary: Summary

    def cells(self) -> tuple[str, ...]:
        summary = self.summary
        values = (summary.median, summary.least, summary.most)
        return (self.name, *map(_rounded, values), self.unit, str(summary.times))


@dataclass(frozen=True, slots=True)
class Report:
    """Holds the figures and what follows from them."""

    measured: Mapping[str, Any]
    """What the measuring process returned."""
    versions: Mapping[str, str]
    figures: tuple[Figure, ...]
    not_measured: Mapping[str, str]
    """The points that were not measured, with the reason."""
    weight_bytes_per_token: int
    share: float | None
    """The share of the measured bandwidth at which decode of one sequence reads weights; None if it is not stated."""
    no_share: str
    """Why no share is stated."""

    @classmethod
    def of(cls, measured: Mapping[str, Any], versions: Mapping[str, str]) -> Report:
        samples: Mapping[str, list[dict[str, float]]] = measured["samples"]
        figures, missing = [], {}
        short, single = PREFILL[0].name, DECODE[0].name
        if short in samples:
            first = [1000 * sample["first"] for sample in samples[short]]
            figures.append(Figure(FIRST_TOKEN, "ms", Summary.of(first)))
        for point in (*PREFILL, *DECODE):
            if point.name not in samples:
                missing[point.name] = f"{point.tokens} tokens do not fit in the context of {measured['max_model_len']}"
                continue
            kind = "decode" if point.is_decode else "prefill"
            values = [sample[kind] for sample in samples[point.name]]
            figures.append(Figure(point.name, "tokens/s", Summary.of(values)))
        weights = sum(worker["weight_bytes_per_token"] for worker in measured["workers"])
        if single in samples:
            read = [sample["decode"] * weights / 1e9 for sample in samples[single]]
            figures.append(Figure(f"weights, read by {single}", "GB/s", Summary.of(read)))
        if measured["readings"]:
            rates = [rate / 1e9 for rate in measured["readings"]]
            figures.append(Figure(BANDWIDTH, "GB/s", Summary.of(rates)))
        share, reason = _share(measured, figures)
        return cls(measured, versions, tuple(figures), missing, weights, share, reason)

    @property
    def threads(self) -> int | None:
        """Returns the threads of all workers, or None on a device that does not compute with the host's threads."""
        each = [worker["threads"] for worker in self.measured["workers"]]
        return None if None in each else sum(each)

    def as_json(self) -> dict[str, Any]:
        measured, worker = self.measured, self.measured["workers"][0]
        others, steal = measured["other_load"] or (None, None)
        return {
            "model": measured["model"],
            "device": worker["device"],
            "card": worker["card"],
            "workers": len(measured["workers"]),
            "threads": self.threads,
            "dtype": measured["dtype"],
            "quantization": measured["quantization"],
            "kv_cache_dtype": measured["kv_cache_dtype"],
            "versions": dict(self.versions),
            "figures": [{"name": one.name, "unit": one.unit, **asdict(one.summary)} for one in self.figures],
            "not_measured": dict(self.not_measured),
            "weight_bytes_per_token": self.weight_bytes_per_token,
            "share_of_bandwidth": self.share,
            "no_share": self.no_share,
            "other_programs": others,
            "steal": steal,
            "reliable": not _unreliable(measured),
            "seconds_to_start": measured["seconds_to_start"],
            "seconds": measured["seconds"],
        }

    def heading(self) -> str:
        measured, worker = self.measured, self.measured["workers"][0]
        weights = f"{measured['quantization']} weights, " if measured["quantization"] else ""
        parts = [f"{measured['model']} ({weights}{measured['dtype']}) on {worker['device']}: {worker['card']}"]
        if self.threads is not None:
            parts.append(f"{self.threads} thread{'s' * (self.threads > 1)}")
        if (workers := len(measured["workers"])) > 1:
            parts.append(f"{workers} workers")
        return f"{', '.join(parts)}\n{', '.join(f'{name} {version}' for name, version in self.versions.items())}"

    def remarks(self) -> list[str]:
        """Returns what is to be known about the figures, one line each."""
        lines = [f"{name}: not measured, {reason}" for name, reason in self.not_measured.items()]
        megabytes = f"{self.weight_bytes_per_token / 1e6:.1f} MB of weights are read per token"
        if self.share is None:
            lines.append(f"{megabytes}; the share of the bandwidth is not stated: {self.no_share}")
        else:
            lines.append(f"{megabytes}: decode of one sequence reaches {self.share:.0%} of the measured bandwidth")
        load = self.measured["other_load"]
        if load is None:
            lines.append("the system does not count the processor time of other programs (/proc/stat)")
        else:
            lines.append(f"meanwhile, other programs took {load[0]:.0%} of the processor time, and steal {load[1]:.0%}")
        if reason := _unreliable(self.measured):
            lines.append(f"NOT RELIABLE: {reason}; measure again on an idle machine")
        return lines


def _share(measured: Mapping[str, Any], figures: list[Figure]) -> tuple[float | None, str]:
    """Returns the share of the bandwidth, or None with the reason why it is not stated."""
    by_name = {figure.name: figure.summary.median for figure in figures}
    weights = by_name.get(f"weights, read by {DECODE[0].name}")
    if weights is None:
        return None, "decode was not measured"
    if BANDWIDTH not in by_name:
        return None, "the device does not measure its memory (Device.read_memory)"
    if reason := _unreliable(measured):
        return None, reason
    return weights / by_name[BANDWIDTH], ""


def _unreliable(measured: Mapping[str, Any]) -> str:
    """Returns why the figures are not reliable, or an empty text."""
    load = measured["other_load"]
    return "the machine was busy with other work" if load is not None and sum(load) > BUSY else ""


def _rounded(value: float) -> str:
    """Returns a number with three significant digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
