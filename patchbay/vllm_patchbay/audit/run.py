"""Runs an audit: reads the plugin's files, checks them against each vLLM, compares the vLLMs.

Large plugins are read by as many processes as there are cores. A file that is too large, too slow or not Python is
reported and left out; a file that ends the process reading it, too. Nothing of the plugin or of vLLM is imported.
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

from vllm_patchbay.audit.caller_evidence import Doubtful, decide
from vllm_patchbay.audit.checks import CHECKS
from vllm_patchbay.audit.checks.context import Context, Upstream
from vllm_patchbay.audit.checks.entry_points import check as check_entry_points
from vllm_patchbay.audit.comparison import Outlook, compare, ordered, upstream_diff, with_changes
from vllm_patchbay.audit.entry_points import EntryPoint
from vllm_patchbay.audit.facts import FileFacts
from vllm_patchbay.audit.file_reader import read_file
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.plugin import Plugin, PluginFile, read_source
from vllm_patchbay.audit.plugin_files import Collection, collect, unreadable
from vllm_patchbay.audit.rules import RULES, Severity
from vllm_patchbay.audit.vllm_target import Judge, Target
from vllm_patchbay.upstream.source import SourceError, SourceTree, Wheel

LARGEST_FILE = 2 * 2**20
"""Bytes. A syntax tree takes about a hundred times the memory of its source."""

SLOWEST_FILE = 20
"""Seconds."""

_MEMORY_OF_A_READER = 4 * 2**30
_WORTH_PROCESSES = 1_500_000
"""Bytes of source below which starting processes costs more than it saves."""
_CHUNK = 400_000


@dataclass(frozen=True, slots=True)
class Report:
    path: str
    versions: tuple[str, ...]
    """Of the vLLMs, oldest first."""
    files: int
    findings: tuple[Finding, ...]

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    def worst(self) -> Severity | None:
        return max((finding.severity for finding in self.findings), default=None)


def audit(
    path: Path | str,
    trees: Sequence[SourceTree],
    *,
    exclude: Sequence[str] = (),
    workers: int = 1,
    diff: bool = False,
) -> Report:
    """What would break in the plugin at `path` with each of the vLLMs.

    With more than one of `workers`, processes are started; a script that asks for that needs the usual
    ``if __name__ == "__main__"``.
    """
    collection = collect(Path(path), exclude)
    read = _read_all(collection, workers)
    plugin = collection.plugin
    plugin.gather(read)
    findings = list(collection.findings)
    findings += [unreadable(file.file, file.unreadable, file.unreadable_line) for file in read if file.unreadable]
    targets = ordered([Target(tree, plugin) for tree in trees])
    outlooks = _check_all(targets, collection.entry_points, workers)
    for number, outlook in enumerate(outlooks):
        if number:
            older = outlooks[number - 1]
            outlook.findings = with_changes(outlook.findings, older, outlook)
            compared = list(compare(plugin, older, outlook))
            if diff:
                compared = _with_diffs(compared, targets[number - 1], targets[number], older, outlook, plugin)
            outlook.findings += compared
        findings += outlook.findings
    unique = sorted(set(findings), key=lambda finding: finding.order)
    return Report(str(path), tuple(target.label for target in targets), len(plugin.files), tuple(unique))


def _with_diffs(
    findings: list[Finding], older: Target, newer: Target, before: Outlook, after: Outlook, plugin: Plugin
) -> list[Finding]:
    changes: dict[tuple[str, int, int], tuple[Upstream | None, Upstream]] = {}
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


def _read_all(collection: Collection, workers: int) -> list[FileFacts]:
    plugin = collection.plugin
    roots = plugin.packages | {"vllm"}
    chunks = list(_chunks(plugin.files))
    if workers <= 1 or len(chunks) * _CHUNK < _WORTH_PROCESSES:
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
    # One of these ended its process, and the others were lost with it.
    result += [_read_alone(file, collection.wheel, roots) for file in lost]
    return result


def _chunks(files: Sequence[PluginFile]) -> Iterator[list[PluginFile]]:
    chunk: list[PluginFile] = []
    size = 0
    for file in files:
        chunk.append(file)
        size += _size(file)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(file: PluginFile) -> int:
    if file.path is None:
        return 10_000
    try:
        return min(file.path.stat().st_size, LARGEST_FILE)
    except OSError:
        return 0


def _read_chunk(files: list[PluginFile], wheel: Wheel | None, roots: frozenset[str]) -> list[FileFacts]:
    return [read_one(file, wheel, roots) for file in files]


def _read_alone(file: PluginFile, wheel: Wheel | None, roots: frozenset[str]) -> FileFacts:
    with _pool(1, _limit_memory) as pool:
        try:
            return pool.submit(read_one, file, wheel, roots).result()
        except BrokenProcessPool:
            return FileFacts(file.name, unreadable="reading it ended the process that did it")


def read_one(file: PluginFile, wheel: Wheel | None, roots: frozenset[str]) -> FileFacts:
    """The facts of a file, or why there are none."""

    def left_out(why: str, line: int | None = 0) -> FileFacts:
        return FileFacts(file.name, unreadable=why, unreadable_line=line or 0)

    try:
        source = read_source(file, wheel, LARGEST_FILE)
        with _time_limit(SLOWEST_FILE):
            return read_file(file.name, source, file.module, file.is_package, roots)
    except SourceError as fault:
        return left_out(str(fault))
    except SyntaxError as fault:
        return left_out(
            f"it is not Python that {sys.version_info[0]}.{sys.version_info[1]} reads: {fault.msg}", fault.lineno
        )
    except ValueError as fault:
        return left_out(f"it is not Python source: {fault}")
    except (RecursionError, MemoryError):
        return left_out("it is nested too deeply or too large to be analysed")
    except _TooSlow:
        return left_out(f"it took more than {SLOWEST_FILE} s to analyse")


class _TooSlow(Exception):
    pass


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupts Python code. Only the main thread of a process can set one; elsewhere there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- checking


def _check_all(targets: list[Target], entry_points: list[EntryPoint], workers: int) -> list[Outlook]:
    compares = len(targets) > 1
    plugin = targets[0].plugin if targets else None
    is_large = plugin is not None and sum(map(len, plugin.facts.values())) > 2_000
    if workers <= 1 or not compares or not is_large:
        return [check_target(target, entry_points, compares) for target in targets]
    with _pool(min(workers, len(targets)), None) as pool:
        jobs: list[Future[Outlook]] = [pool.submit(check_target, t, entry_points, compares) for t in targets]
        return [job.result() for job in jobs]


def check_target(target: Target, entry_points: Sequence[EntryPoint], compares: bool) -> Outlook:
    outlook = Outlook(target.label)
    doubtful: list[Doubtful] = []
    for file, facts in target.plugin.facts.items():
        context = Context(
            file,
            facts,
            target,
            Judge(target, facts),
            compares,
            outlook.targets_found,
            outlook.members_found,
            outlook.members_missing,
            doubtful,
        )
        for check in CHECKS:
            outlook.findings += check(context)
    outlook.findings += decide(target.index, target.tree, doubtful)
    outlook.findings += _unreadable_upstream(target)
    outlook.findings += check_entry_points(target, entry_points)
    return outlook


def _unreadable_upstream(target: Target) -> Iterator[Finding]:
    for file, why in target.survey.unreadable:
        rule = RULES["BP902"]
        message = f"vLLM's {file} was left out, and what the plugin does with it is not checked: {why}"
        remedy = "get this vLLM again"
        yield Finding(rule.id, rule.severity, file, 0, 0, message, target.label, remedy)


# --- processes


def _pool(workers: int, initializer: Callable[[], None] | None) -> ProcessPoolExecutor:
    # Not forked: whoever calls this as a library may have threads.
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=initializer)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _MEMORY_OF_A_READER if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_OF_A_READER)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
