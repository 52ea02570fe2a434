"""Defines what the scheduler side of KV offload sends to the worker side in one step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Describes a block that is complete after the step, and is then copied from the KV cache to a slot."""

    key: bytes
    slot: int
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Describes a block to be copied into the KV cache."""

    key: bytes
    block_id: int
    from_peer: bool = False
    """Whether the block comes from the peer rather than from this server's store."""


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Lists the blocks for which a request waits. Blocks from the peer are last."""

    request_id: str
    blocks: tuple[BlockLoad, ...]


@dataclass(slots=True)
class StepMetadata:
    """Lists the loads and saves of one scheduler step."""

    weights: int = 0
    """Number of times that weights have changed, as far as the scheduler knew when it planned the step."""
    reset: bool = False
    """Whether all offloaded blocks are discarded, before anything else in this step."""
    idle: bool = False
    """Whether the step computes nothing, so that it may wait a little for loads."""
    loads: list[RequestLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
