"""The checks turn the facts of a plugin and one vLLM into findings. Each file has one check."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm_patchbay.audit.checks import assignments, imports, overrides, registrations, uses, variables
from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.findings import Finding

CHECKS: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    imports.check,
    uses.check,
    assignments.check,
    registrations.check,
    overrides.check,
    variables.check,
)
"""Checks of the facts of one Python file. `checks.entry_points` checks the project files."""
