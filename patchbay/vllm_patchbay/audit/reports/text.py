"""Formats the report as a table. A finding that is the same for several vLLMs takes one row."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.run import Report


def as_text(report: Report, least: Severity = Severity.WARNING) -> Iterator[str]:
    """Yields the lines of the report. Findings below the severity `least` are counted, but not shown."""
    shown = [(finding, versions) for finding, versions in _merged(report) if finding.severity >= least]
    rows = [
        (
            f"{finding.file}:{finding.line}:{finding.column}" if finding.line else finding.file,
            finding.severity.word,
            finding.rule_id,
            "all" if len(versions) == len(report.versions) > 1 else ", ".join(versions) or "-",
        )
        for finding, versions in shown
    ]
    if rows:
        header = ("WHERE", "SEVERITY", "RULE", "VLLM")
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        # One long path must not widen the column for all other rows.
        widths[0] = min(widths[0], 60)
        yield _line(header, widths, "WHAT")
        for row, (finding, _) in zip(rows, shown, strict=True):
            yield _line(row, widths, finding.message)
            if finding.remedy:
                yield f"    {finding.remedy}"
            for line in finding.diff.splitlines():
                yield f"    | {line}"
        yield ""
    yield _summary(report, least)


def _line(cells: tuple[str, ...], widths: list[int], last: str) -> str:
    return "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last])


def _summary(report: Report, least: Severity) -> str:
    counts = [
        f"{count} {severity.word}{'s' * (count != 1)}{' (not shown)' * (severity < least)}"
        for severity in reversed(Severity)
        if (count := report.count(severity))
    ]
    against = " and ".join(f"vLLM {version}" for version in report.versions)
    files = f"{report.files} file{'s' * (report.files != 1)}"
    return f"{files} against {against}: {', '.join(counts) or 'nothing found'}."


def _merged(report: Report) -> Iterator[tuple[Finding, list[str]]]:
    """Yields each finding once, with the versions of the vLLMs that it is about."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in report.findings:
        key = (finding.file, finding.line, finding.column, finding.rule_id, finding.severity, finding.message)
        groups.setdefault(key, []).append(finding)
    for same in groups.values():
        yield same[0], [finding.vllm for finding in same if finding.vllm]
