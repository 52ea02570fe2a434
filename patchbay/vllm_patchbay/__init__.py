"""Patchbay reads vLLM's source, applies checked patches to it, and audits plugins against its releases.

`upstream` reads a vLLM without importing it, `patch` declares, verifies and applies patches, `audit` reports what a
given vLLM breaks in a plugin. No module of this package imports vLLM or PyTorch.
"""

__version__ = "0.1.0"
