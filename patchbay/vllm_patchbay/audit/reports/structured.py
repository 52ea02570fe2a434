"""Formats the report as a JSON document. New versions add fields, and do not rename or remove any."""

from __future__ import annotations

from typing import Any

from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.run import Report


def as_json(report: Report) -> dict[str, Any]:
    """Returns the report as a document of JSON values."""
    return {
        "path": report.path,
        "vllm": list(report.versions),
        "files": report.files,
        "counts": {severity.word: report.count(severity) for severity in reversed(Severity)},
        "findings": [
            {
                "rule": finding.rule_id,
                "name": finding.rule.name,
                "severity": finding.severity.word,
                "file": finding.file,
                "line": finding.line,
                "column": finding.column,
                "vllm": finding.vllm,
                "message": finding.message,
                "remedy": finding.remedy,
                **({"diff": finding.diff} if finding.diff else {}),
            }
            for finding in report.findings
        ],
    }
