"""What decode steps tell the layers, kept from one to the next.

vLLM decides anew for every step how it is executed, and makes slot mappings and attention metadata: dictionaries over
all layers, and a dozen views of buffers that stay where they are. In a decode step with as many sequences as one
before, they are the same, and only what lies behind the last sequence is to be written again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, PAD_SLOT_ID
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from vllm_backplane.attention.metadata import BackplaneMetadataBuilder
from vllm_backplane.attention.mla import LatentMetadataBuilder
from vllm_backplane.attention.state_metadata import StateMetadataBuilder

OF_VIEWS = (BackplaneMetadataBuilder, LatentMetadataBuilder, StateMetadataBuilder)
"""Builders of metadata that holds views of the runner's buffers, and numbers that follow from how many sequences there
are. Layers write nothing into it; what one wrote would be there at the next step."""


@dataclass(frozen=True, slots=True)
class _Kept:
    result: Any
    behind: tuple[torch.Tensor, ...]
    """Of the buffers, what is behind the last sequence."""


class DecodeMetadata:
    """For a runner whose decode steps runner/decode_inputs.py prepares."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._batch: Any = None
        self._caches: Any = None
        self._keeps = False
        self._modes: dict[Hashable, Any] = {}
        self._slots: dict[Hashable, _Kept] = {}
        self._attention: dict[Hashable, _Kept] = {}

    def mode(self, make: Callable[[], Any], sizes: dict[str, Any]) -> Any:
        """How the step is executed, and padded to what; by vLLM's own `make` the first time."""
        if not self._may_keep() or self._runner.parallel_config.data_parallel_size > 1:  # there, others decide with it
            return make()
        key = (sizes["num_tokens"], sizes["num_encoder_reqs"])
        if key not in self._modes:
            self._modes[key] = make()
        return self._modes[key]

    def slots(self, make: Callable[[], Any], sizes: dict[str, Any]) -> Any:
        """Slot mappings, the same way."""
        if not self._may_keep():
            return make()
        tokens, padded = sizes["num_tokens_unpadded"], sizes["num_tokens_padded"]
        tables = self._batch.block_table.block_tables
        return self._kept(
            self._slots,
            (tokens, padded),
            make,
            PAD_SLOT_ID,
            lambda: [t.slot_mapping.gpu[tokens:padded] for t in tables],
        )

    def attention(self, make: Callable[[], Any], sizes: dict[str, Any]) -> Any:
        """Attention metadata of all layers, the same way."""
        if not self._may_keep():
            return make()
        count, padded = sizes["num_reqs"], sizes["num_reqs_padded"] or sizes["num_reqs"]
        key = (count, padded, sizes["num_tokens"], sizes["num_tokens_padded"])
        tables = self._batch.block_table.block_tables
        return self._kept(
            self._attention, key, make, NULL_BLOCK_ID, lambda: [t.get_device_tensor(padded)[count:] for t in tables]
        )

    @staticmethod
    def _kept(
        among: dict[Hashable, _Kept],
        key: Hashable,
        make: Callable[[], Any],
        nothing: int,
        behind: Callable[[], list[torch.Tensor]],
    ) -> Any:
        if (kept := among.get(key)) is None:
            kept = among[key] = _Kept(make(), tuple(part for part in behind() if len(part)))
        else:
            for part in kept.behind:
                part.fill_(nothing)
        return kept.result

    def _may_keep(self) -> bool:
        """The batch has the buffers, and layers are grouped by their caches: with others everything is made again."""
        runner = self._runner
        if self._batch is not runner.input_batch or self._caches is not runner.kv_cache_config:
            self._batch, self._caches = runner.input_batch, runner.kv_cache_config
            self._modes.clear()
            self._slots.clear()
            self._attention.clear()
            self._keeps = _made_of_views(runner)
        return self._keeps


def _made_of_views(runner: Any) -> bool:
    others = CrossAttentionSpec | EncoderOnlyAttentionSpec
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    groups = [group for groups in runner.attn_groups for group in groups]
    return (
        not runner.is_mm_prefix_lm
        and not runner.vllm_config.observability_config.cudagraph_metrics  # of every step
        and not any(isinstance(spec, others) for spec in specs)
        and all(type(group.get_metadata_builder()) in OF_VIEWS and group.kernel_block_size is None for group in groups)
    )
