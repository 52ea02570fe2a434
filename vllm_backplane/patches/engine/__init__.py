"""Holds the patches for the process of the engine core, one patch_<module>.py per module of vLLM. There is none at
present.
"""
