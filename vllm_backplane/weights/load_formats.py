"""Defines the names and settings of the load formats that share or fetch weights.

Importing this module does not import vLLM, because the options are checked before a loader exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_backplane.errors import OptionError, nearest
from vllm_backplane.peering.addresses import Address, loopback_address
from vllm_backplane.settings.options import integer

SHARED = "backplane_shared"
SHARED_GGUF = "backplane_shared_gguf"
"""Replaces `backplane_shared` for a GGUF file. Users do not pass it."""
PEER = "backplane_peer"
ALL_SHARED = (SHARED, SHARED_GGUF)


_WHERE = f"--model-loader-extra-config of --load-format {PEER}"


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Holds the value of `--model-loader-extra-config` for `--load-format backplane_peer`."""

    peer: Address
    """Address at which the first worker of the running server offers its weights."""
    timeout: float = 10.0
    """Seconds without a response after which an attempt fails."""
    attempts: int = 4
    """Failed attempts in a row, without progress, after which loading fails."""


PEER_KEYS = ("peer", "timeout", "attempts")


def parse_peer_settings(given: Any) -> PeerSettings:
    """Returns the checked settings. Raises OptionError for a missing, unknown or invalid key."""
    if not isinstance(given, dict) or "peer" not in given:
        raise OptionError(
            f"{_WHERE} lacks 'peer', the address at which a running server offers its weights; add "
            """--model-loader-extra-config '{"peer": "127.0.0.1:9100"}'"""
        )
    for key in given:
        if key not in PEER_KEYS:
            raise OptionError(
                f"unknown key {key!r} in {_WHERE}{nearest(str(key), PEER_KEYS)} Known: {', '.join(PEER_KEYS)}."
            )
    try:
        peer = loopback_address(given["peer"])
        attempts = integer(1, 100)(given.get("attempts", 4))
    except ValueError as fault:
        raise OptionError(f"{_WHERE} is {given!r}; expected {fault}") from None
    timeout = given.get("timeout", 10.0)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 600:
        raise OptionError(f"'timeout' in {_WHERE} is {timeout!r}; expected seconds, more than 0 and at most 600")
    return PeerSettings(peer, float(timeout), attempts)
