"""Parses and checks `kv_connector_extra_config` of the KV offload connector, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_backplane.errors import OptionError, nearest
from vllm_backplane.peering.addresses import Address, loopback_address
from vllm_backplane.settings.options import byte_count

NAME = "BackplaneOffloadConnector"
_WHERE = f"kv_connector_extra_config of {NAME}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Holds the checked value of `kv_connector_extra_config`."""

    capacity: int
    """Bytes that all workers of the host together may use."""
    folder: Path | None
    """Folder for the files with blocks; None for host memory."""
    listen: Address | None = None
    """Address at which other servers may request blocks."""
    peer: Address | None = None
    """Address at which another server listens."""
    peer_timeout: float = 5.0
    """Seconds without a response after which a request to the peer fails."""


KNOWN = ("capacity", "folder", "listen", "peer", "peer_timeout")


def parse(given: Mapping[str, Any]) -> Settings:
    """Returns the checked settings. Raises OptionError for a missing, unknown or invalid key."""
    for key in given:
        if key not in KNOWN:
            raise OptionError(f"unknown key {key!r} in {_WHERE}{nearest(str(key), KNOWN)} Known: {', '.join(KNOWN)}.")
    if "capacity" not in given:
        raise OptionError(f'{_WHERE} lacks \'capacity\', the size limit in bytes; add "capacity": "2GiB"')
    try:
        capacity = byte_count(given["capacity"])
    except ValueError as fault:
        raise OptionError(f"'capacity' in {_WHERE} is {given['capacity']!r}; expected {fault}") from None
    listen, peer = (_address(key, given.get(key)) for key in ("listen", "peer"))
    if listen is not None and listen == peer:
        raise OptionError(f"'listen' and 'peer' in {_WHERE} are both {listen}; name another server in 'peer'")
    return Settings(capacity, _folder(given.get("folder")), listen, peer, _seconds(given.get("peer_timeout", 5.0)))


def _address(key: str, given: Any) -> Address | None:
    if given is None:
        return None
    try:
        return loopback_address(given)
    except ValueError as fault:
        raise OptionError(f"{key!r} in {_WHERE} is {given!r}; expected {fault}") from None


def _seconds(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= 600:
        raise OptionError(f"'peer_timeout' in {_WHERE} is {given!r}; expected seconds, more than 0 and at most 600")
    return float(given)


def _folder(given: Any) -> Path | None:
    if given is None:
        return None
    if not isinstance(given, str) or not Path(given).is_absolute():
        raise OptionError(f"'folder' in {_WHERE} is {given!r}; expected the absolute path of a folder")
    if not Path(given).is_dir():
        raise OptionError(f"'folder' in {_WHERE} is {given!r}, which is not a folder; create it, or name another")
    return Path(given)
