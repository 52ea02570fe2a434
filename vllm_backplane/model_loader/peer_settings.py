"""What `--model-loader-extra-config` says for `--load-format backplane_peer`: typed, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_backplane.errors import OptionError, nearest
from vllm_backplane.loopback.addresses import Address, loopback_address
from vllm_backplane.model_loader.formats import PEER
from vllm_backplane.options import integer

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
