"""Caches the attention metadata of decode steps from one step to the next.

For every step, vLLM decides how it is executed, and builds slot mappings and attention metadata: dictionaries over all
layers, with a dozen views of buffers that stay in place. In a decode step with as many sequences as an earlier one,
these objects are the same, and only the padding behind the last sequence has to be written again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, PAD_SLOT_ID
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from vllm_backplane.attention.metadata import BackplaneMetadataBuilder
from vllm_backplane.attention.mla import BackplaneMLAMetadataBuilder
from vllm_backplane.attention.state_metadata import StateMetadataBuilder

CACHEABLE_BUILDERS = (BackplaneMetadataBuilder, BackplaneMLAMetadataBuilder, StateMetadataBuilder)
"""Builders whose metadata holds only views of the runner's buffers, and numbers that follow from the number of
sequences. Layers must not write into this metadata: the next step would see it."""


@dataclass(frozen=True, slots=True)
class _Cached:
    result: Any
    padding: tuple[torch.Tensor, ...]
    """Views of the buffers behind the last sequence."""


class DecodeMetadataCache:
    """Caches metadata for a runner whose decode steps `runner/decode_inputs.py` prepares.

    Each public method takes vLLM's own method as `make` and the keyword arguments of the call as `sizes`. It calls
    `make` the first time, and returns the cached result in later steps with the same sizes.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._batch: Any = None
        self._kv_cache_config: Any = None
        self._is_cacheable = False
        self._modes: dict[Hashable, Any] = {}
        self._slots: dict[Hashable, _Cached] = {}
        self._attention: dict[Hashable, _Cached] = {}

    def mode(self, make: Callable[[], Any], sizes: dict[str, Any]) -> Any:
        """Returns how the step is executed, and to which size it is padded."""
        # Data-parallel ranks decide this together in every step.
        if not self._can_cache() or self._runner.parallel_config.data_parallel_size > 1:
            return make()
        key = (sizes["num_tokens"], sizes["num_encoder_reqs"])
        if key not in self._modes:
            self._modes[key] = make()
        return self._modes[key]

    def slots(self, make: Callable[[], Any], sizes: dict[str, Any]) -> Any:
        """Returns the slot mappings of the step."""
        if not self._can_cache():
            return make()
        tokens, padded = sizes["num_tokens_unpadded"], sizes["num_tokens_padded"]
        tables = self._batch.block_table.block_tables
        return self._cached(
            self._slots,
            (tokens, padded),
            make,
            PAD_SLOT_ID,
            lambda: [t.slot_mapping.gpu[tokens:padded] for t in tables],
        )

    def attention(self, make: Callable[[], Any], sizes: dict[str, Any]) -> Any:
        """Returns the attention metadata of all layers."""
        if not self._can_cache():
            return make()
        count, padded = sizes["num_reqs"], sizes["num_reqs_padded"] or sizes["num_reqs"]
        key = (count, padded, sizes["num_tokens"], sizes["num_tokens_padded"])
        tables = self._batch.block_table.block_tables
        return self._cached(
            self._attention, key, make, NULL_BLOCK_ID, lambda: [t.get_device_tensor(padded)[count:] for t in tables]
        )

    @staticmethod
    def _cached(
        cache: dict[Hashable, _Cached],
        key: Hashable,
        make: Callable[[], Any],
        pad: int,
        find_padding: Callable[[], list[torch.Tensor]],
    ) -> Any:
        """Returns the cached result for `key` after filling its padding with `pad`, or makes and caches it."""
        if (found := cache.get(key)) is None:
            found = cache[key] = _Cached(make(), tuple(part for part in find_padding() if len(part)))
        else:
            for part in found.padding:
                part.fill_(pad)
        return found.result

    def _can_cache(self) -> bool:
        """Returns whether results may be cached, and drops cached results of another batch or KV cache configuration:
        the batch owns the buffers, and the configuration groups the layers."""
        runner = self._runner
        if self._batch is not runner.input_batch or self._kv_cache_config is not runner.kv_cache_config:
            self._batch, self._kv_cache_config = runner.input_batch, runner.kv_cache_config
            self._modes.clear()
            self._slots.clear()
            self._attention.clear()
            self._is_cacheable = _is_cacheable(runner)
        return self._is_cacheable


def _is_cacheable(runner: Any) -> bool:
    """Returns whether the metadata of decode steps depends on nothing but buffers and the number of sequences."""
    encoder_specs = CrossAttentionSpec | EncoderOnlyAttentionSpec
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    groups = [group for groups in runner.attn_groups for group in groups]
    return (
        not runner.is_mm_prefix_lm
        and not runner.vllm_config.observability_config.cudagraph_metrics  # these count every step
        and not any(isinstance(spec, encoder_specs) for spec in specs)
        and all(
            type(group.get_metadata_builder()) in CACHEABLE_BUILDERS and group.kernel_block_size is None
            for group in groups
        )
    )
