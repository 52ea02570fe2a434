"""Counts blocks by outcome for vLLM's log and for Prometheus: `backplane:kv_offload_blocks_total{outcome="loaded"}`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_backplane.guards import guarded
from vllm_backplane.kv_offload.store import Outcome

METRIC = "backplane:kv_offload_blocks"


class OffloadStats(KVConnectorStats):
    """Counts blocks by outcome since the last report, in `data`. Each worker counts its own part of a block."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for outcome, count in other.data.items():
            self.data[outcome] = self.data.get(outcome, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"blocks {outcome}": count for outcome, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not any(self.data.values())


@guarded(
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics.__init__",
    why="its private attributes hold the classes of metrics",
    feature="KV offload",
)
class OffloadPromMetrics(KVConnectorPromMetrics):
    """Exports the numbers of blocks by outcome as Prometheus counters."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = self._counter_cls(
            name=METRIC,
            documentation="Blocks of KV offload, by outcome.",
            labelnames=[*labelnames, "outcome"],
        )
        self._counters = {
            (engine, outcome.value): counter.labels(*values, outcome.value)
            for engine, values in per_engine_labelvalues.items()
            for outcome in Outcome
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for outcome, count in transfer_stats_data.items():
            self._counters[engine_idx, outcome].inc(count)
