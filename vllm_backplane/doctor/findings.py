"""Defines a finding: one problem and its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
Mark = Literal["ok", "warning", "error", "-"]
"""The status of one line of the report; '-' is neutral."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Describes a problem and its remedy."""

    severity: Severity
    """'error': serving would fail or would not use Backplane. 'warning': serving would work."""
    what: str
    remedy: str


def error(what: str, remedy: str) -> Finding:
    return Finding("error", what, remedy)


def warning(what: str, remedy: str) -> Finding:
    return Finding("warning", what, remedy)
