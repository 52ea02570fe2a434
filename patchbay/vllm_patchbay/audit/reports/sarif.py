"""Formats the report as SARIF 2.1.0, which code-scanning services show next to the audited lines."""

from __future__ import annotations

import hashlib
import os
from typing import Any
from urllib.parse import quote

from vllm_patchbay import __version__
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import RULES, Rule
from vllm_patchbay.audit.run import Report

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_sarif(report: Report) -> dict[str, Any]:
    """Returns the report as a SARIF document."""
    numbers = {rule_id: number for number, rule_id in enumerate(RULES)}
    rules = [_rule(rule) for rule in RULES.values()]
    driver: dict[str, Any] = {"name": "vllm-patchbay audit", "version": __version__, "rules": rules}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {"ROOT": {"description": {"text": "the audited folder or wheel"}}},
                "results": [_result(finding, numbers[finding.rule_id]) for finding in report.findings],
            }
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.explanation},
        "help": {"text": f"{rule.remedy[0].upper()}{rule.remedy[1:]}."},
        "defaultConfiguration": {"level": rule.severity.word},
    }


def _result(finding: Finding, number: int) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": quote(os.fsencode(finding.file)), "uriBaseId": "ROOT"}}
    if finding.line:
        location["region"] = {"startLine": finding.line, "startColumn": max(finding.column, 1)}
    text = f"{finding.message} (vLLM {finding.vllm})" if finding.vllm else finding.message
    return {
        "ruleId": finding.rule_id,
        "ruleIndex": number,
        "level": finding.severity.word,
        "message": {"text": f"{text}. Remedy: {finding.remedy}." if finding.remedy else f"{text}."},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"finding/v1": _identity(finding)},
        "properties": {"vllm": finding.vllm, **({"diff": finding.diff} if finding.diff else {})},
    }


def _identity(finding: Finding) -> str:
    """Returns a hash that stays the same if the finding only moves within its file."""
    text = "\0".join([finding.rule_id, finding.file, finding.vllm, finding.message])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
