"""Defines a finding: what is wrong in the plugin, where, and with which vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_patchbay.audit.rules import RULES, Rule, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """Describes one violation of a rule, at one line of the plugin and for one vLLM."""

    rule_id: str
    severity: Severity
    file: str
    """Path relative to the audited folder, with forward slashes."""
    line: int
    """Line number from 1; 0 if the finding is about the file as a whole."""
    column: int
    """Column number from 1; 0 if the line is 0."""
    message: str
    vllm: str = ""
    """Version of the vLLM that the finding is about; empty if it is about the plugin alone."""
    remedy: str = ""
    diff: str = ""
    """Unified diff of the upstream source, for a finding about changed source when diffs are requested."""

    @property
    def rule(self) -> Rule:
        """Returns the rule that the finding violates."""
        return RULES[self.rule_id]

    @property
    def order(self) -> tuple[str, int, int, str, str]:
        """Returns the key by which a report sorts its findings."""
        return self.file, self.line, self.column, self.rule_id, self.vllm
