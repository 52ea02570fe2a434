"""A vLLM platform plugin that has nothing to do with Backplane and applies its own patches with vllm-patchbay."""

from __future__ import annotations


def register() -> str:
    return "foreign_npu.platform.ForeignPlatform"
