"""One finding: what is wrong, where, and with which vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_patchbay.audit.rules import RULES, Rule, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    rule_id: str
    severity: Severity
    file: str
    """Relative to the audited folder, with forward slashes."""
    line: int
    """From 1; 0 if the finding is about the file as a whole."""
    column: int
    """From 1; 0 with line 0."""
    message: str
    vllm: str = ""
    """Version of the vLLM it is about; empty if it is about the plugin alone."""
    remedy: str = ""
    diff: str = ""
    """Upstream's change, where there is one to show."""

    @property
    def rule(self) -> Rule:
        return RULES[self.rule_id]

    @property
    def order(self) -> tuple[str, int, int, str, str]:
        return self.file, self.line, self.column, self.rule_id, self.vllm
