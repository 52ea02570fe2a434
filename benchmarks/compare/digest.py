"""The part of all results that the project's README shows. `docs/generate.py` puts it there."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare import results, table, targets
from benchmarks.compare.report import known_facts, machine_line
from benchmarks.compare.samples import grouped
from benchmarks.compare.subjects import SUBJECTS
from benchmarks.compare.workloads import FULL

SHOWN = ("decode", "prefill", "startup")
NOTHING = "No results are in the repository yet; `make bench` writes them for the machine it runs on."


def digest(root: Path) -> str:
    """Of every class of machine below `root`: the main tables, a plot, and what holds of what was asked for."""
    parts: list[str] = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        runs = results.load(folder)
        found = grouped(results.all_samples(runs))
        if not found:
            continue
        where = f"benchmarks/results/{folder.name}"
        parts.append(f"{machine_line(runs)} All tables, plots and commands: [{where}]({where}/README.md).")
        for subject in SUBJECTS:
            for workload in (one for one in FULL if one.name in SHOWN):
                text = table.comparison(subject.name, workload, found)
                if text:
                    parts += [f"{subject.title}. {workload.title}: median (range).", text]
            if (folder / f"{subject.name}-decode.svg").exists():
                parts.append(f"![{subject.name}: decode]({where}/{subject.name}-decode.svg)")
        models = [subject.name for subject in SUBJECTS if any(key[0] == subject.name for key in found)]
        verdicts = [v for v in targets.judge(found, models, known_facts(runs)) if v.holds is not None]
        if verdicts:
            parts += ["Held against what the project asks of itself, where it was measured:", table.verdicts(verdicts)]
    return "\n\n".join(parts) or NOTHING
