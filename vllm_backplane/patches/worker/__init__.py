"""Holds the patches for the processes that run the model, one patch_<module>.py per module of vLLM. There is none at
present.
"""
