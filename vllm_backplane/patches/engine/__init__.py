"""Patches for the engine core's process. One patch_<module>.py per module of vLLM."""
