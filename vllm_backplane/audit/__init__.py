"""The auditor: what would break in a vLLM plugin with a given vLLM, told from source alone."""

from vllm_backplane.audit.findings import Finding
from vllm_backplane.audit.rules import RULES, Rule, Severity
from vllm_backplane.audit.run import Report, audit

__all__ = ["RULES", "Finding", "Report", "Rule", "Severity", "audit"]
