"""Examines the installation and what vLLM would do with it, for `vllm-backplane doctor`.

Checks return values, and `cli/doctor.py` prints them. Importing this package imports neither torch nor vLLM, because a
broken installation of either must be reported too.
"""

from vllm_backplane.doctor.findings import Finding
from vllm_backplane.doctor.report import Report, examine

__all__ = ["Finding", "Report", "examine"]
