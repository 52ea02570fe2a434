"""Builds the metadata of layers with a recurrent state: the tokens and the state slot of each request in a batch.

vLLM sorts such a batch into prefill and decode requests and cuts prompts into chunks, for its own kernels. Backplane's
operators take requests of any query length, so one set of tensors serves Mamba, Mamba2 and the gated delta net.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_backplane.guards import guarded


@dataclass(frozen=True, slots=True)
class StateMetadata(AttentionMetadata):
    num_actual_tokens: int
    state_indices: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    """Largest number of tokens of one request in the step."""

    @property
    def row_arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the arguments by which the operators of `ops/recurrence.py` find tokens and states."""
        return self.state_indices, self.query_start_loc, self.seq_lens


@guarded(
    "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
    why="it reads which batches are captured, which is set here",
    feature="recurrent layers",
)
@guarded(
    "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder._compute_common_metadata",
    "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
    why="the builder that is replaced finds the states of requests in the same way",
    feature="recurrent layers",
    mentions=("mamba_get_block_table_tensor",),
)
@guarded(
    "vllm.v1.attention.backends.utils:mamba_get_block_table_tensor",
    why="without prefix caching, the state of a request is in its first block",
    feature="recurrent layers",
)
class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    # Graphs may replay: every tensor is a view of a persistent buffer.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract upstream
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **_speculative_arguments: Any,
    ) -> StateMetadata:
        common = common_attn_metadata
        return StateMetadata(
            num_actual_tokens=common.num_actual_tokens,
            # A request has one state, in its first block: config/ refuses prefix caching for these models.
            state_indices=common.block_table_tensor[: common.num_reqs, 0],
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            max_query_len=common.max_query_len,
        )


class _StateBackend(AttentionBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("layers with a recurrent state have no attention implementation")

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class MambaStateBackend(_StateBackend):
    @staticmethod
    def get_name() -> str:
        return "MAMBA1_ATTN"


class Mamba2StateBackend(_StateBackend):
    @staticmethod
    def get_name() -> str:
        return "MAMBA2_ATTN"


class DeltaStateBackend(_StateBackend):
    @staticmethod
    def get_name() -> str:
        return "GDN_ATTN"
