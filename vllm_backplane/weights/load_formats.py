"""Names of the load formats that share or fetch weights, for whoever asks before a loader is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_backplane.errors import OptionError, nearest
from vllm_backplane.peering.addresses import Address, loopback_address
from vllm_backplane.settings.options import integer

SHARED = "backplane_shared"
SHARED_GGUF = "backplane_shared_gguf"
"""What the first becomes for a GGUF file; nobody writes it."""
PEER = "backplane_peer"
ALL_SHARED = (SHARED, SHARED_GGUF)


_WHERE = f"--model-loader-extra-config of --load-format {PEER}"


@dataclass(frozen=True, slots=True)
class PeerSettings:
    peer: Address
    """Where the first worker of the running server offers its weights."""
    timeout: float = 10.0
    """Seconds after which a peer that says nothing is given up."""
    attempts: int = 4
    """How often in a row it may fail."""


KNOWN = ("peer", "timeout", "attempts")


def parse(given: Any) -> PeerSettings:
    if not isinstance(given, dict) or "peer" not in given:
        raise OptionError(
            f"{_WHERE} lacks 'peer', where a running server offers its weights; add "
            """--model-loader-extra-config '{"peer": "127.0.0.1:9100"}'"""
        )
    for key in given:
        if key not in KNOWN:
            raise OptionError(f"unknown key {key!r} in {_WHERE}{nearest(str(key), KNOWN)} Known: {', '.join(KNOWN)}.")
    try:
        peer = loopback_address(given["peer"])
        attempts = integer(1, 100)(given.get("attempts", 4))
    except ValueError as fault:
        raise OptionError(f"{_WHERE} is {given!r}; expected {fault}") from None
    timeout = given.get("timeout", 10.0)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 600:
        raise OptionError(f"'timeout' in {_WHERE} is {timeout!r}; expected seconds, more than 0 and at most 600")
    return PeerSettings(peer, float(timeout), attempts)
