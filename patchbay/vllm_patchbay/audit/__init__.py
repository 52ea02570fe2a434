"""The auditor reports what would break in a vLLM plugin with a given vLLM, from source alone.

Neither the plugin nor vLLM is imported. This package imports `vllm_patchbay.upstream` and `vllm_patchbay.errors` only.
"""

from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import RULES, Rule, Severity
from vllm_patchbay.audit.run import Report, audit

__all__ = ["RULES", "Finding", "Report", "Rule", "Severity", "audit"]
