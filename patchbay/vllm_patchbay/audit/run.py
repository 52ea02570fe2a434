"""Runs an audit: reads the plugin's files, checks them against each vLLM, and compares the vLLMs.

A large plugin is read by several processes. A file that is too large, takes too long, is not Python, or crashes the
process that reads it is reported and left out. Neither the plugin nor vLLM is imported.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

from vllm_patchbay.audit.caller_evidence import UndecidedOverride, with_caller_evidence
from vllm_patchbay.audit.checks import CHECKS
from vllm_patchbay.audit.checks.context import Context, UpstreamDefinition
from vllm_patchbay.audit.checks.entry_points import check as check_entry_points
from vllm_patchbay.audit.comparison import (
    TargetResult,
    compare,
    sorted_by_version,
    upstream_diff,
    with_signature_changes,
)
from vllm_patchbay.audit.entry_points import EntryPoint
from vllm_patchbay.audit.facts import FileFacts
from vllm_patchbay.audit.file_reader import read_file
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.plugin import Plugin, PluginFile, read_source
from vllm_patchbay.audit.plugin_files import CollectedPlugin, collect, unreadable_finding
from vllm_patchbay.audit.rules import RULES, Severity
from vllm_patchbay.audit.vllm_target import ConditionEvaluator, VllmTarget
from vllm_patchbay.upstream.source import SourceError, SourceTree, Wheel

MAX_FILE_BYTES = 2 * 2**20
"""Size of the largest file that is read. A syntax tree takes about a hundred times the memory of its source."""

MAX_FILE_SECONDS = 20
"""Seconds after which the analysis of a file is given up."""

_READER_MEMORY = 4 * 2**30
"""Address space of a process that reads files, in bytes."""
_MIN_PARALLEL_BYTES = 1_500_000
"""Size of a plugin below which starting processes takes longer than it saves."""
_CHUNK_BYTES = 400_000
"""Size of the files that a process reads at once."""


@dataclass(frozen=True, slots=True)
class Report:
    """Holds the result of an audit."""

    path: str
    versions: tuple[str, ...]
    """Versions of the vLLMs, oldest first."""
    files: int
    """Number of the plugin's Python files."""
    findings: tuple[Finding, ...]

    def count(self, severity: Severity) -> int:
        """Returns the number of findings of a severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def worst(self) -> Severity | None:
        """Returns the highest severity of all findings; None if there are none."""
        return max((finding.severity for finding in self.findings), default=None)


def audit(
    path: Path | str,
    trees: Sequence[SourceTree],
    *,
    exclude: Sequence[str] = (),
    workers: int = 1,
    diff: bool = False,
) -> Report:
    """Reports what would break in the plugin at `path` with each of the vLLMs.

    With more than one of `workers`, processes may be started with the spawn method. A script that calls this function
    so needs the usual ``if __name__ == "__main__"``.
    """
    collection = collect(Path(path), exclude)
    read = _read_all(collection, workers)
    plugin = collection.plugin
    plugin.gather(read)
    findings = list(collection.findings)
    findings += [
        unreadable_finding(file.file, file.unreadable, file.unreadable_line) for file in read if file.unreadable
    ]
    targets = sorted_by_version([VllmTarget(tree, plugin) for tree in trees])
    results = _check_all(targets, collection.entry_points, workers)
    for number, result in enumerate(results):
        if number:
            older = results[number - 1]
            result.findings = with_signature_changes(result.findings, older, result)
            compared = list(compare(plugin, older, result))
            if diff:
                compared = _with_diffs(compared, targets[number - 1], targets[number], older, result, plugin)
            result.findings += compared
        findings += result.findings
    unique = sorted(set(findings), key=lambda finding: finding.order)
    return Report(str(path), tuple(target.label for target in targets), len(plugin.files), tuple(unique))


def _with_diffs(
    findings: list[Finding],
    older: VllmTarget,
    newer: VllmTarget,
    before: TargetResult,
    after: TargetResult,
    plugin: Plugin,
) -> list[Finding]:
    changes: dict[tuple[str, int, int], tuple[UpstreamDefinition | None, UpstreamDefinition]] = {}
    for (file, number), now in after.targets_found.items():
        place = plugin.facts[file][number].place
        changes[file, place.line, place.column] = (before.targets_found.get((file, number)), now)
    result = []
    for finding in findings:
        change = changes.get((finding.file, finding.line, finding.column))
        if finding.rule_id == "BP202" and change is not None and change[0] is not None:
            finding = replace(finding, diff=upstream_diff(older.tree, newer.tree, change[0], change[1]))
        result.append(finding)
    return result


# --- reading


def _read_all(collection: CollectedPlugin, workers: int) -> list[FileFacts]:
    plugin = collection.plugin
    roots = plugin.packages | {"vllm"}
    chunks = list(_chunks(plugin.files))
    if workers <= 1 or len(chunks) * _CHUNK_BYTES < _MIN_PARALLEL_BYTES:
        return [read_one(file, collection.wheel, roots) for file in plugin.files]
    result: list[FileFacts] = []
    lost: list[PluginFile] = []
    with _pool(min(workers, len(chunks)), _limit_memory) as pool:
        jobs = {pool.submit(_read_chunk, chunk, collection.wheel, roots): chunk for chunk in chunks}
        for job, chunk in jobs.items():
            try:
                result += job.result()
            except BrokenProcessPool:
                lost += chunk
    # One of these files crashed its process, and the results of the others were lost with it.
    result += [_read_alone(file, collection.wheel, roots) for file in lost]
    return result


def _chunks(files: Sequence[PluginFile]) -> Iterator[list[PluginFile]]:
    chunk: list[PluginFile] = []
    size = 0
    for file in files:
        chunk.append(file)
        size += _size(file)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(file: PluginFile) -> int:
    if file.path is None:
        return 10_000
    try:
        return min(file.path.stat().st_size, MAX_FILE_BYTES)
    except OSError:
        return 0


def _read_chunk(files: list[PluginFile], wheel: Wheel | None, roots: frozenset[str]) -> list[FileFacts]:
    return [read_one(file, wheel, roots) for file in files]


def _read_alone(file: PluginFile, wheel: Wheel | None, roots: frozenset[str]) -> FileFacts:
    with _pool(1, _limit_memory) as pool:
        try:
            return pool.submit(read_one, file, wheel, roots).result()
        except BrokenProcessPool:
            return FileFacts(file.name, unreadable="the process that read it crashed")


def read_one(file: PluginFile, wheel: Wheel | None, roots: frozenset[str]) -> FileFacts:
    """Returns the facts of a file, or the reason why it cannot be audited (`FileFacts.unreadable`)."""

    def left_out(why: str, line: int | None = 0) -> FileFacts:
        return FileFacts(file.name, unreadable=why, unreadable_line=line or 0)

    try:
        source = read_source(file, wheel, MAX_FILE_BYTES)
        with _time_limit(MAX_FILE_SECONDS):
            return read_file(file.name, source, file.module, file.is_package, roots)
    except SourceError as fault:
        return left_out(str(fault))
    except SyntaxError as fault:
        return left_out(
            f"it is not valid Python {sys.version_info[0]}.{sys.version_info[1]}: {fault.msg}", fault.lineno
        )
    except ValueError as fault:
        return left_out(f"it is not Python source: {fault}")
    except (RecursionError, MemoryError):
        return left_out("it is nested too deeply or too large to be analysed")
    except _TooSlow:
        return left_out(f"it took more than {MAX_FILE_SECONDS} s to analyse")


class _TooSlow(Exception):
    pass


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupts Python code with a signal after a time. Only the main thread can do so; others have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_over = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except SystemError:
        # Python 3.11 raises this one instead if the signal comes while it builds a syntax tree.
        if is_over:
            raise _TooSlow from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- checking


def _check_all(targets: list[VllmTarget], entry_points: list[EntryPoint], workers: int) -> list[TargetResult]:
    compares_versions = len(targets) > 1
    plugin = targets[0].plugin if targets else None
    is_large = plugin is not None and sum(map(len, plugin.facts.values())) > 2_000
    if workers <= 1 or not compares_versions or not is_large:
        return [check_target(target, entry_points, compares_versions) for target in targets]
    with _pool(min(workers, len(targets)), None) as pool:
        jobs: list[Future[TargetResult]] = [
            pool.submit(check_target, t, entry_points, compares_versions) for t in targets
        ]
        return [job.result() for job in jobs]


def check_target(target: VllmTarget, entry_points: Sequence[EntryPoint], compares_versions: bool) -> TargetResult:
    """Runs all checks against one vLLM."""
    result = TargetResult(target.label)
    undecided: list[UndecidedOverride] = []
    for file, facts in target.plugin.facts.items():
        context = Context(
            file,
            facts,
            target,
            ConditionEvaluator(target, facts),
            compares_versions,
            result.targets_found,
            result.members_found,
            result.members_missing,
            undecided,
        )
        for check in CHECKS:
            result.findings += check(context)
    result.findings += with_caller_evidence(target.index, target.tree, undecided)
    result.findings += _unreadable_upstream(target)
    result.findings += check_entry_points(target, entry_points)
    return result


def _unreadable_upstream(target: VllmTarget) -> Iterator[Finding]:
    for file, why in target.survey.unreadable:
        rule = RULES["BP902"]
        message = f"vLLM's {file} was left out, and the plugin's uses of it are not checked: {why}"
        remedy = "download or install this vLLM again"
        yield Finding(rule.id, rule.severity, file, 0, 0, message, target.label, remedy)


# --- processes


def _pool(workers: int, initializer: Callable[[], None] | None) -> ProcessPoolExecutor:
    # Spawned, not forked: a program that uses this as a library may have threads.
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=initializer)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = _READER_MEMORY if hard == resource.RLIM_INFINITY else min(hard, _READER_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
