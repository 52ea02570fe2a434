"""A finding: one thing that is wrong, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
Mark = Literal["ok", "warning", "error", "-"]
"""How one line of the report stands; '-' says that there is nothing to judge."""


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    """'error': serving would fail, or would not happen on Backplane. 'warning': it would work, but."""
    what: str
    remedy: str


def error(what: str, remedy: str) -> Finding:
    return Finding("error", what, remedy)


def warning(what: str, remedy: str) -> Finding:
    return Finding("warning", what, remedy)
