"""Implements vLLM's device communicator over the device's torch.distributed backend.

vLLM's base class covers collectives of equal pieces. This class adds pieces of unequal size, which data parallel with
expert parallel needs: each rank has its own number of tokens. gloo has neither all-gather nor reduce-scatter for
unequal pieces, so these consist of broadcasts and of an all-reduce, whose results do not depend on how the pieces are
cut.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from vllm_backplane.errors import BackplaneError


class BackplaneCommunicator(DeviceCommunicatorBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_all2all:
            if self.all2all_backend not in ("naive", "allgather_reducescatter"):
                raise BackplaneError(
                    f"all2all backend {self.all2all_backend!r} needs CUDA; choose "
                    "--all2all-backend allgather_reducescatter"
                )
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Returns the concatenation of all ranks' pieces along `dim`. `sizes` are the lengths of the pieces by rank."""
        if isinstance(input_, list):
            return [self._all_gatherv(one, dim, sizes) for one in input_]
        return self._all_gatherv(input_, dim, sizes)

    def _all_gatherv(self, input_: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
        if self.world_size == 1:
            return input_
        dim %= input_.dim()
        sizes = self._checked_sizes(input_.shape[dim], sizes)
        pieces = []
        for rank, size in enumerate(sizes):
            if rank == self.rank_in_group:
                piece = input_.contiguous()
            else:
                shape = list(input_.shape)
                shape[dim] = size
                piece = torch.empty(shape, dtype=input_.dtype, device=input_.device)
            if size:
                dist.broadcast(piece, src=self.ranks[rank], group=self.device_group)
            pieces.append(piece)
        return torch.cat(pieces, dim=dim)

    def _checked_sizes(self, own: int, sizes: list[int] | None) -> list[int]:
        if sizes is None:
            return [own] * self.world_size
        if len(sizes) != self.world_size or sizes[self.rank_in_group] != own:
            raise BackplaneError(
                f"rank {self.rank_in_group} holds {own} rows, but the sizes given for {self.world_size} ranks "
                f"are {sizes}; pass the number of rows of each rank"
            )
        return sizes

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Returns this rank's piece, along `dim`, of the sum over all ranks."""
        if self.world_size == 1:
            return input_
        dim %= input_.dim()
        length = input_.shape[dim]
        if sizes is None:
            if length % self.world_size:
                raise BackplaneError(f"{length} rows do not divide over {self.world_size} ranks; give sizes")
            sizes = [length // self.world_size] * self.world_size
        if len(sizes) != self.world_size or sum(sizes) != length:
            raise BackplaneError(
                f"sizes {sizes} do not cut {length} rows into {self.world_size} pieces; pass one size per rank, with "
                f"the sum {length}"
            )
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.device_group)
        start = sum(sizes[: self.rank_in_group])
        return total.narrow(dim, start, sizes[self.rank_in_group]).contiguous()

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.reduce_scatterv(input_, dim)

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> Any:
        return self._all2all().dispatch_router_logits(hidden_states, router_logits, is_sequence_parallel, extra_tensors)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> Any:
        return self._all2all().dispatch(hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        return self._all2all().combine(hidden_states, is_sequence_parallel)

    def _all2all(self) -> Any:
        if self.all2all_manager is None:
            raise BackplaneError(
                f"group {self.unique_name!r} was built without all-to-all, which vLLM uses in the group 'ep' "
                "with data parallelism; set --enable-expert-parallel and --data-parallel-size"
            )
        return self.all2all_manager
