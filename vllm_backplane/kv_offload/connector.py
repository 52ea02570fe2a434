"""Implements `BackplaneOffloadConnector`, a KV connector of vLLM that offloads KV cache blocks to host memory or disk.

    --kv-transfer-config '{"kv_connector": "BackplaneOffloadConnector", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"capacity": "2GiB"}}'

vLLM creates one connector for the scheduler (`scheduler.py`) and one for each worker (`worker.py`). Loads are
asynchronous in vLLM's sense: a request runs only after all its blocks have been loaded and verified.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from vllm_backplane.errors import BackplaneError
from vllm_backplane.guards import guarded
from vllm_backplane.kv_offload import settings
from vllm_backplane.kv_offload.blocks_client import BlockClient
from vllm_backplane.kv_offload.blocks_protocol import model_identity
from vllm_backplane.kv_offload.blocks_server import BlockServer
from vllm_backplane.kv_offload.cache_rows import CacheRows
from vllm_backplane.kv_offload.metadata import StepMetadata, WeightsReport
from vllm_backplane.kv_offload.metrics import OffloadPromMetrics, OffloadStats
from vllm_backplane.kv_offload.scheduler import OffloadScheduler
from vllm_backplane.kv_offload.slots import FileSlots, MemorySlots, Slots
from vllm_backplane.kv_offload.store import BlockStore, Outcome
from vllm_backplane.kv_offload.worker import OffloadWorker
from vllm_backplane.peering.digests import without_model_path
from vllm_backplane.settings import compat
from vllm_backplane.settings.carried_state import workers_on_host

logger = init_logger("vllm." + __name__)


@dataclass
class OffloadConnectorMetadata(KVConnectorMetadata):
    """Carries what the scheduler's connector sends to the workers' in each step."""

    step: StepMetadata


@dataclass
class OffloadHandshakeMetadata(KVConnectorHandshakeMetadata):
    """Carries what a worker's connector sends to the scheduler's at start."""

    slots: int
    identity: bytes
    """Identity of the model; empty while its weights are being replaced, and if blocks are not exchanged with other
    servers."""


@guarded(
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.__init__",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1._get_connector_metadata",
    why="its private attributes hold the configuration and the metadata of a step",
    feature="KV offload",
)
class BackplaneOffloadConnector(KVConnectorBase_V1):
    """Implements the connector of one process: the scheduler's or a worker's, depending on `role`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._block_size = _require_full_attention(kv_cache_config)
        _require_one_stage(vllm_config.parallel_config)
        _require_prefix_caching(vllm_config.cache_config)
        self._shared = self._settings.listen is not None or self._settings.peer is not None
        if self._shared and vllm_config.parallel_config.data_parallel_size > 1:
            raise BackplaneError(
                "'listen' and 'peer' of KV offload do not work with --data-parallel-size; remove the option or the keys"
            )
        # The scheduler queries the peer's first worker; each worker fetches its part from the one with its own rank.
        rank = 0 if role == KVConnectorRole.SCHEDULER else get_tensor_model_parallel_rank()
        self._peer = self._make_peer(rank)
        self._connector_scheduler = OffloadScheduler(self._block_size, self._peer)
        self._connector_worker: OffloadWorker | None = None
        self._server: BlockServer | None = None
        self._model: torch.nn.Module | None = None
        self._identity = b""
        self._slots = 0

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: a block that was not saved is computed again."""
        return False

    def _make_peer(self, rank: int) -> BlockClient | None:
        address = self._settings.peer
        return None if address is None else BlockClient(address.of_rank(rank), self._settings.peer_timeout, _warn)

    # --- worker ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        cache = CacheRows(kv_caches.values(), self._kv_cache_config.num_blocks)
        workers = workers_on_host(self._vllm_config)
        self._slots = self._settings.capacity // workers // cache.row_bytes
        if self._slots == 0:
            raise BackplaneError(
                f"'capacity' of KV offload is {self._settings.capacity} bytes for {workers} worker(s), but one block "
                f"takes {cache.row_bytes} bytes in each; raise it to {workers * cache.row_bytes} or more"
            )
        store = BlockStore(self._make_slots(cache, workers))
        self._connector_worker = OffloadWorker(cache, store, self._peer, _warn)
        logger.info("KV offload: up to %d blocks of %d bytes in %s.", self._slots, cache.row_bytes, store.describe())

    def _make_slots(self, cache: CacheRows, workers: int) -> Slots:
        if self._settings.folder is not None:
            return FileSlots(self._settings.folder, self._slots, cache.row_bytes, workers)
        return MemorySlots(self._slots, cache.row_bytes)

    def bind_model(self, model: torch.nn.Module) -> None:
        """Computes the model's identity and starts the server for peers, if blocks are exchanged. The worker calls it
        when weights and KV cache exist."""
        self._model = model
        if not self._shared:
            return
        self._update_identity()
        if self._settings.listen is not None:
            address = self._settings.listen.of_rank(get_tensor_model_parallel_rank())
            self._server = BlockServer(address, self._identity, self.connector_worker.store, _warn)
            logger.info("KV offload: other servers of this host may request blocks at %s.", address)

    def _update_identity(self) -> None:
        assert self._model is not None
        config = self._vllm_config
        described = {
            "model": without_model_path(config.model_config.hf_config.to_dict()),
            "types": [
                str(config.model_config.dtype),
                config.model_config.quantization,
                config.cache_config.cache_dtype,
            ],
            "block": [self._block_size, *self.connector_worker.cache.layout],
            "part": [config.parallel_config.tensor_parallel_size, get_tensor_model_parallel_rank()],
            "vllm": compat.vllm_version(),
        }
        self._set_identity(model_identity(self._model, described))

    def _set_identity(self, identity: bytes) -> None:
        self._identity = identity
        for user in (self._peer, self._server):
            if user is not None:
                user.identity = identity

    @property
    def connector_worker(self) -> OffloadWorker:
        if self._connector_worker is None:
            raise BackplaneError(
                "vLLM has not registered its KV cache with the KV offload connector; remove --kv-transfer-config"
            )
        return self._connector_worker

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._shared and self._model is None:
            raise BackplaneError("'listen' and 'peer' of KV offload need Backplane's worker; remove --worker-cls")
        return OffloadHandshakeMetadata(self._slots, self._identity)

    def _step_metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OffloadConnectorMetadata)
        return metadata.step

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._idle = self._step_metadata().idle
        self.connector_worker.begin_step(self._step_metadata())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.connector_worker.start_loads(self._step_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request runs only after the blocks of all layers have been loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are saved after the forward pass, all layers at once."""

    def wait_for_save(self) -> None:
        self.connector_worker.save_blocks(self._step_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.connector_worker.finish_loads(self._idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.connector_worker.take_failed_blocks()

    def begin_weight_change(self) -> None:
        """Discards all blocks, and ends the exchange of blocks with other servers. The worker calls it before weights
        are replaced or lost. The scheduler learns of it from the report of the next step."""
        self._set_identity(b"")
        self.connector_worker.begin_weight_change()
        logger.info("KV offload: all blocks are discarded, and none is saved until all weights have been replaced.")

    def end_weight_change(self) -> None:
        """Computes the model's identity again. The worker calls it when all weights have been replaced."""
        self.connector_worker.end_weight_change()
        if self._shared:
            self._update_identity()

    def build_connector_worker_meta(self) -> WeightsReport | None:
        since = self.connector_worker.weights_since
        if since == 0:
            return None
        return WeightsReport(since, self._identity if get_tensor_model_parallel_rank() == 0 else b"")

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._connector_worker is not None:
            self._connector_worker.close()
            self._connector_worker = None

    # --- scheduler ------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        workers = [worker for worker in metadata.values() if isinstance(worker, OffloadHandshakeMetadata)]
        self._connector_scheduler.set_slots(min(worker.slots for worker in workers))
        if self._peer is not None:
            self._peer.identity = workers[0].identity

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._connector_scheduler.num_matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._connector_scheduler.plan_load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return OffloadConnectorMetadata(self._connector_scheduler.build_metadata(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WeightsReport):
            self._connector_scheduler.set_weights(report.since)
            if self._peer is not None:
                self._peer.identity = report.identity
        if connector_output.invalid_block_ids:
            self._connector_scheduler.handle_failed_blocks(connector_output.invalid_block_ids)
        self._connector_scheduler.finish_loads(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._connector_scheduler.request_finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        self._connector_scheduler.reset()
        return True

    # --- both -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> OffloadStats | None:
        if self._role == KVConnectorRole.SCHEDULER:
            evicted = self._connector_scheduler.take_evicted()
            counts = {Outcome.EVICTED.value: evicted} if evicted else {}
        else:
            counts = self.connector_worker.take_counts()
        return OffloadStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def connector_of_worker() -> BackplaneOffloadConnector | None:
    """Returns the KV offload connector of this worker, or None if the worker has none or another one."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector if isinstance(connector, BackplaneOffloadConnector) else None


def _warn(text: str) -> None:
    logger.warning("%s.", text)


def _require_full_attention(kv_cache_config: Any) -> int:
    """Returns the block size. Raises unless all layers use full attention: vLLM reuses the blocks that a sliding window
    has left, and the states of Mamba layers are not blocks of tokens, so token keys cannot identify their content."""
    specs: Iterable[Any] = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = {type(spec) for spec in specs}
    if len(kv_cache_config.kv_cache_groups) != 1 or not kinds <= {FullAttentionSpec, MLAAttentionSpec}:
        raise BackplaneError(
            f"KV offload requires one KV cache group of full-attention layers, but this model has "
            f"{len(kv_cache_config.kv_cache_groups)} group(s) of "
            f"{', '.join(sorted(kind.__name__ for kind in kinds)) or 'no layers'}; remove --kv-transfer-config"
        )
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def _require_prefix_caching(cache: Any) -> None:
    """Raises unless prefix caching is on. vLLM turns it off for models that must compute a prompt in one piece (some
    pooling models)."""
    if not cache.enable_prefix_caching:
        raise BackplaneError(
            "KV offload loads the beginnings of prompts and requires prefix caching, but prefix caching is off, by "
            "--no-enable-prefix-caching or because the model computes prompts in one piece; remove the option or "
            "--kv-transfer-config"
        )


def _require_one_stage(parallel: Any) -> None:
    """Raises for pipeline and context parallel, with which a worker holds only some layers or tokens of a block."""
    for size, option in (
        (parallel.pipeline_parallel_size, "--pipeline-parallel-size"),
        (parallel.decode_context_parallel_size, "--decode-context-parallel-size"),
        (parallel.prefill_context_parallel_size, "--prefill-context-parallel-size"),
    ):
        if size > 1:
            raise BackplaneError(
                f"KV offload does not work with {option} {size}; remove the option or --kv-transfer-config"
            )
