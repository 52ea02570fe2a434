"""What layers that carry a state need to know about a batch: where each row's tokens and its state are.

vLLM sorts such a batch into prompts and decoding and cuts prompts into chunks, for its kernels. The operators here take
rows of any length, so one set of tensors serves Mamba, Mamba2 and the gated delta net.
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


@dataclass(frozen=True, slots=True)
class StateMetadata(AttentionMetadata):
    num_actual_tokens: int
    state_indices: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    longest: int
    """Tokens of the longest row."""

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the operators of `ops/recurrence.py` take them."""
        return self.state_indices, self.query_start_loc, self.seq_lens


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    # Every tensor above is a part of a buffer that stays.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract upstream
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **_for_speculation: Any,
    ) -> StateMetadata:
        common = common_attn_metadata
        return StateMetadata(
            num_actual_tokens=common.num_actual_tokens,
            # Without prefix caching (configuration.py insists on that) a request has one state, in its first block.
            state_indices=common.block_table_tensor[: common.num_reqs, 0],
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            longest=common.max_query_len,
        )


class _StateBackend(AttentionBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("layers that carry a state compute it themselves")

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
