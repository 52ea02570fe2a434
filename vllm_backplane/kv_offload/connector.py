"""`BackplaneTier`, a KV connector of vLLM: a second, bounded tier for the KV cache, in host memory or on disk.

    --kv-transfer-config '{"kv_connector": "BackplaneTier", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"capacity": "2GiB"}}'

vLLM makes one for the scheduler (`planning.py`) and one for each worker (`carrying.py`). Loads are asynchronous in
vLLM's sense: no token is computed from a block before it has been checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
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
from vllm_backplane.kv_offload import settings
from vllm_backplane.kv_offload.cache_rows import Pages
from vllm_backplane.kv_offload.metadata import Orders
from vllm_backplane.kv_offload.metrics import TierMetrics, TierStats
from vllm_backplane.kv_offload.peer_client import Peer
from vllm_backplane.kv_offload.peer_protocol import identity
from vllm_backplane.kv_offload.peer_server import Listener
from vllm_backplane.kv_offload.scheduler import Planner
from vllm_backplane.kv_offload.slots import FileSlots, MemorySlots, Slots
from vllm_backplane.kv_offload.store import BlockStore, Outcome
from vllm_backplane.kv_offload.worker import Carrier
from vllm_backplane.peering.digests import without_origin
from vllm_backplane.runtime import runtime
from vllm_backplane.settings import compat
from vllm_backplane.settings.carried_state import workers_on_host

logger = init_logger("vllm." + __name__)


@dataclass
class StepOrders(KVConnectorMetadata):
    orders: Orders


@dataclass
class WorkerTells(KVConnectorHandshakeMetadata):
    slots: int
    identity: bytes
    """Empty where the tier is this server's alone."""


class BackplaneTier(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._block_size = _insist_on_full_attention(kv_cache_config)
        _insist_on_one_stage(vllm_config.parallel_config)
        _insist_on_prefix_caching(vllm_config.cache_config)
        self._shared = self._settings.listen is not None or self._settings.peer is not None
        if self._shared and vllm_config.parallel_config.data_parallel_size > 1:
            raise BackplaneError(
                "'listen' and 'peer' of the second KV tier do not serve --data-parallel-size; remove one"
            )
        # The scheduler asks the other server's first worker what it has; each worker gets its part from its like.
        rank = 0 if role == KVConnectorRole.SCHEDULER else get_tensor_model_parallel_rank()
        self._peer = self._make_peer(rank)
        self._planner = Planner(self._block_size, self._peer)
        self._carrier: Carrier | None = None
        self._listener: Listener | None = None
        self._model: torch.nn.Module | None = None
        self._identity = b""
        self._slots = 0

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not kept is computed again."""
        return False

    def _make_peer(self, rank: int) -> Peer | None:
        address = self._settings.peer
        return None if address is None else Peer(address.of_rank(rank), self._settings.peer_timeout, _warn)

    # --- a worker -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pages = Pages(kv_caches.values(), self._kv_cache_config.num_blocks)
        workers = workers_on_host(self._vllm_config)
        self._slots = self._settings.capacity // workers // pages.row_bytes
        if self._slots == 0:
            raise BackplaneError(
                f"'capacity' of the second KV tier is {self._settings.capacity} bytes for {workers} worker(s), and one "
                f"block takes {pages.row_bytes} in each; raise it to {workers * pages.row_bytes} or more"
            )
        store = BlockStore(self._make_slots(pages, workers))
        self._carrier = Carrier(pages, store, self._peer, _warn)
        logger.info(
            "Second KV tier: up to %d blocks of %d bytes in %s.", self._slots, pages.row_bytes, store.describe()
        )

    def _make_slots(self, pages: Pages, workers: int) -> Slots:
        if self._settings.folder is not None:
            return FileSlots(self._settings.folder, self._slots, pages.row_bytes, workers)
        # A KV cache in host memory becomes memory as it is written.
        cache = pages.row_bytes * self._kv_cache_config.num_blocks
        spoken_for = cache if runtime().device.capabilities.host_memory else 0
        return MemorySlots(self._slots, pages.row_bytes, spoken_for, workers)

    def bind_model(self, model: torch.nn.Module) -> None:
        """Called by the worker when weights and KV cache are there."""
        self._model = model
        if not self._shared:
            return
        self._identify()
        if self._settings.listen is not None:
            address = self._settings.listen.of_rank(get_tensor_model_parallel_rank())
            self._listener = Listener(address, self._identity, self.carrier.store, _warn)
            logger.info("Second KV tier: other servers of this host may ask for blocks on %s.", address)

    def _identify(self) -> None:
        assert self._model is not None
        config = self._vllm_config
        described = {
            "model": without_origin(config.model_config.hf_config.to_dict()),
            "types": [
                str(config.model_config.dtype),
                config.model_config.quantization,
                config.cache_config.cache_dtype,
            ],
            "block": [self._block_size, *self.carrier.pages.layout],
            "part": [config.parallel_config.tensor_parallel_size, get_tensor_model_parallel_rank()],
            "vllm": compat.release(),
        }
        self._identity = identity(self._model, described)
        for user in (self._peer, self._listener):
            if user is not None:
                user.identity = self._identity

    @property
    def carrier(self) -> Carrier:
        if self._carrier is None:
            raise BackplaneError("vLLM has not shown its KV cache to the second tier; remove --kv-transfer-config")
        return self._carrier

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._shared and not self._identity:
            raise BackplaneError(
                "'listen' and 'peer' of the second KV tier need Backplane's worker; remove --worker-cls"
            )
        return WorkerTells(self._slots, self._identity)

    def _orders(self) -> Orders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders)
        return metadata.orders

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._idle = self._orders().idle
        self.carrier.begin(self._orders())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.carrier.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs when all its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A block is saved when all its layers are there."""

    def wait_for_save(self) -> None:
        self.carrier.save(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.carrier.arrived(self._idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.carrier.take_failed_blocks()

    def weights_changed(self) -> None:
        """Called by the worker."""
        self.carrier.forget()
        if self._shared:
            self._identify()

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None

    # --- the scheduler --------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        told = [worker for worker in metadata.values() if isinstance(worker, WorkerTells)]
        self._planner.provide(min(worker.slots for worker in told))
        if self._peer is not None:
            self._peer.identity = told[0].identity

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._planner.loadable(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepOrders(self._planner.orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self._planner.failed(connector_output.invalid_block_ids)
        self._planner.loaded(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        self._planner.forget()
        return True

    # --- both -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TierStats | None:
        if self._role == KVConnectorRole.SCHEDULER:
            evicted = self._planner.take_evicted()
            counts = {Outcome.EVICTED.value: evicted} if evicted else {}
        else:
            counts = self.carrier.take_counts()
        return TierStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStats:
        return TierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierMetrics:
        return TierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _warn(text: str) -> None:
    logger.warning("%s.", text)


def _insist_on_full_attention(kv_cache_config: Any) -> int:
    """The block size. vLLM reuses the blocks that a window has left, and states of Mamba layers are no blocks of
    tokens: of such models there is nothing that could be kept under the tokens' names."""
    specs: Iterable[Any] = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = {type(spec) for spec in specs}
    if len(kv_cache_config.kv_cache_groups) != 1 or not kinds <= {FullAttentionSpec, MLAAttentionSpec}:
        raise BackplaneError(
            f"the second KV tier keeps the blocks of layers that attend to all tokens, and this model's KV cache is of "
            f"{', '.join(sorted(kind.__name__ for kind in kinds)) or 'no layers'}; remove --kv-transfer-config"
        )
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def _insist_on_prefix_caching(cache: Any) -> None:
    """vLLM switches it off where a prompt must be computed in one piece (some pooling models)."""
    if not cache.enable_prefix_caching:
        raise BackplaneError(
            "the second KV tier gives requests the beginning of their prompts, and prefix caching is off, by "
            "--no-enable-prefix-caching or because the model computes prompts as a whole; remove the option or the tier"
        )


def _insist_on_one_stage(parallel: Any) -> None:
    for size, option in (
        (parallel.pipeline_parallel_size, "--pipeline-parallel-size"),
        (parallel.decode_context_parallel_size, "--decode-context-parallel-size"),
        (parallel.prefill_context_parallel_size, "--prefill-context-parallel-size"),
    ):
        if size > 1:
            raise BackplaneError(f"the second KV tier does not serve {option} {size}; remove the option or the tier")
