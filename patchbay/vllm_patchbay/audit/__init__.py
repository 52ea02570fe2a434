"""The auditor: what would break in a vLLM plugin with a given vLLM, told from source alone."""

from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import RULES, Rule, Severity
from vllm_patchbay.audit.run import Report, audit

__all__ = ["RULES", "Finding", "Report", "Rule", "Severity", "audit"]
