"""Programs that tests run in an interpreter of their own."""

from __future__ import annotations

import sys

_BEFORE = "import gc; gc.disable()\n"
_AFTER = "\nimport os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)\n"


def command(program: str, *arguments: str) -> list[str]:
    """Runs `program`. Most import vLLM, ten seconds of a core, of which a third is the collector, looking for garbage
    that imports do not leave, and the interpreter's end: both are left out."""
    return [sys.executable, "-c", _BEFORE + program + _AFTER, *arguments]
