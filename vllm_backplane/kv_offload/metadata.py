"""Defines what the scheduler side and the worker side of KV offload send to each other in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


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

    number: int = 0
    """The number of the step, from 1."""
    weights_since: int | None = 0
    """The first step with the present weights, as far as the scheduler knew when it planned the step. None while
    weights are being replaced."""
    reset: bool = False
    """Whether all offloaded blocks are discarded, before anything else in this step."""
    idle: bool = False
    """Whether the step computes nothing, so that it may wait a little for loads."""
    loads: list[RequestLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WeightsReport(KVConnectorWorkerMetadata):
    """Reports new weights to the scheduler. Workers send it with the output of every step after the first change."""

    since: int | None
    """The first step with these weights. None while weights are being replaced."""
    identity: bytes
    """The identity of the model on the first rank. Empty if it is unknown, on other ranks, and without peers."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WeightsReport:
        """Returns the report of all workers: weights are being replaced until every worker has replaced them."""
        assert isinstance(other, WeightsReport)
        since = None if self.since is None or other.since is None else max(self.since, other.since)
        return WeightsReport(since, self.identity or other.identity)
