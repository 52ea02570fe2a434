"""Provides a vLLM platform plugin that is independent of Backplane and applies its own patches with vllm-patchbay."""

from __future__ import annotations


def register() -> str:
    return "foreign_npu.platform.ForeignPlatform"
