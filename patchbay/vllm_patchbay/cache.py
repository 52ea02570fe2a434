"""The folder in which Patchbay keeps the sources of the vLLM releases that it has downloaded."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_patchbay.errors import PatchbayError

VARIABLE = "PATCHBAY_CACHE"


def cache_folder() -> Path:
    """Returns $PATCHBAY_CACHE, or ``vllm-patchbay`` in the user's cache folder."""
    stated = os.environ.get(VARIABLE)
    if stated:
        if not Path(stated).is_absolute():
            raise PatchbayError(f"{VARIABLE} is {stated!r}; set it to the absolute path of a folder")
        return Path(stated)
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules: a relative path there is to be ignored.
    base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    return base / "vllm-patchbay"
