"""Locates the folder that caches the source of downloaded vLLM releases."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_patchbay.errors import PatchbayError

VARIABLE = "PATCHBAY_CACHE"


def cache_folder() -> Path:
    """Returns $PATCHBAY_CACHE, or ``vllm-patchbay`` in the user's cache folder."""
    configured = os.environ.get(VARIABLE)
    if configured:
        if not Path(configured).is_absolute():
            raise PatchbayError(f"{VARIABLE} is {configured!r}; set it to the absolute path of a folder")
        return Path(configured)
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification: a relative path in this variable is to be ignored.
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "vllm-patchbay"
