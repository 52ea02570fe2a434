"""Holds the patches for every process, which apply when vLLM chooses the platform: one patch_<module>.py per module."""
