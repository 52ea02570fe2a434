"""What is installed here, what vLLM would do with it, and what is wrong: the substance of `vllm-backplane doctor`.

Every check is a function that returns values; printing is the command's. Importing this package imports neither torch
nor vLLM, because a broken one of either must still get a report.
"""

from vllm_backplane.doctor.findings import Finding
from vllm_backplane.doctor.report import Report, examine

__all__ = ["Finding", "Report", "examine"]
