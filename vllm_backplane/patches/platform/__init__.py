"""Patches for every process, applied when vLLM chooses the platform. One patch_<module>.py per module of vLLM."""
