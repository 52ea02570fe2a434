"""Patches for every process, applied as soon as the platform is chosen. One patch_<module>.py per module of vLLM."""
