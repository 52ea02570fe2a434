"""Formats the report of an audit: as text for people, as JSON for programs, as SARIF for code-scanning services."""

from vllm_patchbay.audit.reports.sarif import as_sarif
from vllm_patchbay.audit.reports.structured import as_json
from vllm_patchbay.audit.reports.text import as_text

__all__ = ["as_json", "as_sarif", "as_text"]
