"""Measurements on disk: one JSON file per model and workload, below the class of the machine.

A file holds runs. A run has all its samples, the machine, the versions and the command; engines took turns within it,
so ratios are taken between samples of one file.
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
    machine: dict[str, object]
    versions: dict[str, str]
    command: str
    date: str
    commit: str
    samples: list[Sample] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """By variant: why it has no samples here, or not all."""
    bystanders: float = 0.0
    """The share of the processors' time that others took meanwhile."""
    facts: dict[str, int] = field(default_factory=dict)
    """Of the model: what a bound on memory is made of."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By GGUF format, where formats are compared: `bytes`, and `types`, the weights of matrices by their type."""


def file_name(model: str, workload: str) -> str:
    return f"{model}-{workload}.json"


def save(folder: Path, model: str, workload: str, run: Run, *, append: bool) -> Path:
    """Writes the run alone, or after the runs that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(model, workload)
    earlier = json.loads(file.read_text())["runs"] if append and file.exists() else []
    text = json.dumps({"model": model, "workload": workload, "runs": [*earlier, asdict(run)]}, indent=1)
    temporary = file.with_suffix(".partial")
    temporary.write_text(text + "\n")
    temporary.rename(file)
    return file


def load(folder: Path, chosen: Callable[[str], bool] = lambda workload: True) -> list[Run]:
    """All runs below the folder, of the chosen workloads."""
    read = (json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
    return [_run(run) for found in read if chosen(found["workload"]) for run in found["runs"]]


def all_samples(runs: Iterable[Run]) -> list[Sample]:
    return [sample for run in runs for sample in run.samples]


def _run(data: dict[str, Any]) -> Run:
    return Run(**{**data, "samples": [Sample(**sample) for sample in data["samples"]]})
