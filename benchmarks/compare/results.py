"""Stores measurements in one JSON file per model and workload, in a folder per class of machine.

A file has runs. A run has all its samples, the machine, the versions and the command. Engines take turns within a run,
so only samples of one file are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.samples import Sample


@dataclass(slots=True)
class Run:
    """Holds the results of one run of a workload; the field names are keys of the JSON file."""

    machine: dict[str, object]
    versions: dict[str, str]
    command: str
    date: str
    commit: str
    samples: list[Sample] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons, by variant, why samples are missing."""
    bystanders: float = 0.0
    """The share of processor time that other programs took."""
    facts: dict[str, int] = field(default_factory=dict)
    """Sizes of the model from which the memory target is computed."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size (`bytes`) and number of weights by type (`types`) of GGUF files, by format, where formats are compared."""


def file_name(model: str, workload: str) -> str:
    return f"{model}-{workload}.json"


def save(folder: Path, model: str, workload: str, run: Run, *, append: bool) -> Path:
    """Writes the run, after the runs of the file with `append`, otherwise in place of them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(model, workload)
    earlier = json.loads(file.read_text())["runs"] if append and file.exists() else []
    text = json.dumps({"model": model, "workload": workload, "runs": [*earlier, asdict(run)]}, indent=1)
    temporary = file.with_suffix(".partial")
    temporary.write_text(text + "\n")
    temporary.rename(file)
    return file


def load(folder: Path, chosen: Callable[[str], bool] = lambda workload: True) -> list[Run]:
    """Returns all runs of the chosen workloads in the folder."""
    read = (json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
    return [_run(run) for found in read if chosen(found["workload"]) for run in found["runs"]]


def all_samples(runs: Iterable[Run]) -> list[Sample]:
    return [sample for run in runs for sample in run.samples]


def _run(data: dict[str, Any]) -> Run:
    return Run(**{**data, "samples": [Sample(**sample) for sample in data["samples"]]})
