"""Patches for the process of the engine core. One patch_<module>.py per module of vLLM."""
