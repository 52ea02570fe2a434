"""Declares which classes, kernels and IR operators of vLLM Backplane replaces, and registers the replacements.

The declarations name modules by path and import them only when they are checked or registered.
"""

from __future__ import annotations
