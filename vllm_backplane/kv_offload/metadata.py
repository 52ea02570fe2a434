"""What the scheduler's side tells the workers' side in one step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Save:
    """After the step: the KV cache's block is complete, and goes into a slot."""

    key: bytes
    slot: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One block to be put back into the KV cache."""

    key: bytes
    block_id: int
    from_peer: bool = False
    """From another server rather than from the tier."""


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that a request waits for, those of another server last."""

    request_id: str
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Orders:
    forget: bool = False
    """Everything kept is void, before anything else of the step."""
    idle: bool = False
    """Nothing is computed in this step, so it may wait a little for loads."""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
