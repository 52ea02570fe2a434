"""The checks: one file each, each from facts and one vLLM to findings."""

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
"""Each takes the facts of one file. Entry points belong to no file of Python and are checked by themselves."""
