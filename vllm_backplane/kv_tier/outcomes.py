"""What becomes of blocks: the labels under which they are counted."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    STORED = "stored"
    UNWRITTEN = "unwritten"
    """The disk refused it."""
    LOADED = "loaded"
    FETCHED = "fetched"
    """From another server."""
    DAMAGED = "damaged"
    """It was there, and not as it was written."""
    MISSING = "missing"
    UNREACHABLE = "unreachable"
    """Another server said that it has it, and did not send it."""
    EVICTED = "evicted"
    """Others were used later, and the bound was reached."""
