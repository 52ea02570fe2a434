"""Makes the tables that compare the engines on one GGUF file per format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import results, table
from benchmarks.compare.results import Run
from benchmarks.compare.samples import Key, Summary, grouped
from benchmarks.compare.subjects import ALL
from benchmarks.compare.variants import GGUF_FORMATS, LLAMA_CPP, OURS, VARIANTS
from benchmarks.compare.workloads import BY_FORMAT

COMMAND = 'make bench ARGS="--only formats"'
NOTHING = f"No results are in the repository yet; `{COMMAND}` writes them for the machine it runs on."
ENGINES = (OURS, LLAMA_CPP)


def comparison(model: str, runs: Sequence[Run]) -> str:
    """Returns a table with a row per measured format, or an empty string if no format was measured."""
    mine = [run for run in runs if run.samples and run.samples[0].model == model and run.files]
    found = grouped(sample for sample in results.all_samples(mine) if sample.workload == BY_FORMAT.name)
    files: dict[str, dict[str, Any]] = {kind: facts for run in mine for kind, facts in run.files.items()}
    failed = {variant for run in mine for variant in run.failures}
    header = ["format", "types of its matrices", "MiB"]
    header += [f"{point.name}: {what}" for point in BY_FORMAT.points for what in (*ENGINES, "ratio")]
    rows = []
    for kind in GGUF_FORMATS:
        names = {variant.engine: variant.name for variant in VARIANTS if variant.gguf == kind}
        figures = _figures(model, names, found, failed)
        if any(figure != "-" for figure in figures):
            rows.append([kind, *_file(files.get(kind)), *figures])
    return table.markdown(header, rows) if rows else ""


def _figures(model: str, names: Mapping[str, str], found: Mapping[Key, Summary], failed: set[str]) -> list[str]:
    """Returns the medians of both engines and their ratio for each point."""
    cells = []
    for point in BY_FORMAT.points:
        own, peer = (found.get((model, BY_FORMAT.name, point.name, names[engine])) for engine in ENGINES)
        for engine, summary in zip(ENGINES, (own, peer), strict=True):
            missing = "failed" if names[engine] in failed else "-"
            cells.append(missing if summary is None else table.number(summary.median))
        cells.append("-" if own is None or peer is None else f"{own.median / peer.median:.2f}")
    return cells


def _file(facts: Mapping[str, Any] | None) -> list[str]:
    """Returns the shares of the weights by type, and the size of the file in MiB."""
    if facts is None:  # the file could not be made
        return ["-", "-"]
    types: Mapping[str, int] = facts["types"]
    every = sum(types.values())
    shares = [f"{kind} {100 * count / every:.0f} %" for kind, count in types.items()]
    return [next(iter(types)) if len(types) == 1 else ", ".join(shares), f"{facts['bytes'] / 2**20:.0f}"]


def digest(root: Path) -> str:
    """Returns the tables of every class of machine below `root`, for a page of the documentation."""
    parts: list[str] = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        runs = results.load(folder, lambda workload: workload == BY_FORMAT.name)
        for subject in ALL:
            if text := comparison(subject.name, runs):
                machine = runs[-1].machine
                parts += [f"{subject.title}, on {machine['processor']}, {machine['cores']} cores:", text]
        commands = [f"`{run.command}` ({run.date}, {run.commit}, other load {run.bystanders:.0%})" for run in runs]
        failures = [f"- {name} failed: {why}" for run in runs for name, why in run.failures.items()]
        parts += ["\n".join(failures)] if failures else []
        parts += [f"Measured by {', '.join(dict.fromkeys(commands))}."] if commands else []
    return "\n\n".join(parts) or NOTHING
