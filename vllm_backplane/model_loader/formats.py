"""Names of the load formats that share or fetch weights, for whoever asks before a loader is made."""

from __future__ import annotations

SHARED = "backplane_shared"
SHARED_GGUF = "backplane_shared_gguf"
"""What the first becomes for a GGUF file; nobody writes it."""
PEER = "backplane_peer"
ALL_SHARED = (SHARED, SHARED_GGUF)
