"""Finds mistakes in what `vllm-backplane serve` is asked to do, in a fraction of a second, before vLLM is imported.

Every check raises `UsageError` with one line that names the remedy. A check refuses only what is certain to fail: what
it does not know goes on to vLLM, whose own checks follow. Nothing in this folder imports vLLM or torch.
"""

from vllm_backplane.early_checks.all_checks import check_serve_command

__all__ = ["check_serve_command"]
