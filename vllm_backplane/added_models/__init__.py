"""Adds models of the user to the cache: GGUF files and model folders from a path, or from a hub by name.

Names and manifests (`names`, `lookup`) are read without torch and without the parsers of model files.
"""

from vllm_backplane.added_models.entries import Entry, lookup, names

__all__ = ["Entry", "lookup", "names"]
