"""Patches for the processes that run the model. One patch_<module>.py per module of vLLM."""
