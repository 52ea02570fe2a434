"""Patchbay audits vLLM plugins against vLLM releases, and applies checked patches to vLLM.

`upstream` reads vLLM's source without importing it, `patch` declares, verifies and applies patches, `audit` reports
what a given vLLM breaks in a plugin, `cli` is the command ``vllm-patchbay``. No module of this package imports vLLM,
PyTorch or a plugin, so it installs beside any of them.
"""

__version__ = "0.1.0"
