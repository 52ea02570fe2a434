"""Loads and computes the experts of GPTQ, AWQ and compressed-tensors checkpoints.

vLLM's methods for such experts select one of its own kernels, and none is for out-of-tree platforms. This method packs
an expert as soon as all of its tensors have arrived. In the checkpoint's layout, memory holds the tensors of incomplete
experts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from vllm_backplane import ops
from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.host import host_memory
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization.checkpoint.registration import require_usable_scales
from vllm_backplane.quantization.checkpoint.repacking import PackedWords, ZeroPoints, grouping_order, repack
from vllm_backplane.quantization.checkpoint.w8a8_int8 import pack_int8
from vllm_backplane.quantization.packed_parameters import (
    free_storage,
    install_packed,
    move_to_huge_pages,
    release_freed_memory,
)
from vllm_backplane.quantization.per_expert_moe import PerExpertMoEMethod, run_experts
from vllm_backplane.runtime import runtime
from vllm_backplane.settings import compat

_PROJECTIONS = {"up": ("w1", "w3"), "down": ("w2",)}
"""vLLM's names for the weights of an expert, by the linear layer that they are fused into."""


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """Describes how a checkpoint stores the weight of one expert."""

    bits: int
    group: int
    """Weights that share a scale; -1 for one scale per output."""
    codes: str
    """Last part of the tensor's name; the same holds for `scales` and `zero_points`."""
    scales: str
    zero_points: str
    has_zero_points: bool
    output_dim: int
    """The dimension of output features, in all of these tensors."""
    packed_dim: int
    """The dimension along which codes are packed into words. Zero points are packed along the outputs."""
    word_order: tuple[int, ...] = ()
    zero_point_offset: int = 0
    group_index: str | None = None
    """The tensor with the group of each input, if the checkpoint has activation order."""
    ignored: tuple[str, ...] = ()
    """Tensors of the checkpoint that are not needed."""
    is_w8a8: bool = False
    """Whether codes are unpacked int8, and inputs are quantized to 8 bits with one scale per token."""

    @property
    def per_word(self) -> int:
        return 1 if self.is_w8a8 else 32 // self.bits

    @property
    def needed(self) -> tuple[str, ...]:
        zero_points = (self.zero_points,) if self.has_zero_points else ()
        return (self.codes, self.scales, *zero_points, *((self.group_index,) if self.group_index else ()))


class CheckpointMoEMethod(PerExpertMoEMethod):
    source = "quantized checkpoints"
    uses_meta_device = True  # vLLM's check of what was loaded skips the layer, which checks its experts itself

    def __init__(self, moe: FusedMoEConfig, prefix: str, expert_format: ExpertFormat) -> None:
        super().__init__(moe, prefix)
        self._format = expert_format
        self._loaded: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        self._complete: set[int] = set()
        self._processed = False

    def create_parameters(self, layer: Any) -> None:
        if get_current_vllm_config().load_config.load_format == "dummy":
            raise BackplaneError(
                f"--load-format dummy makes no weights for the quantized experts of {self._prefix}; load a checkpoint, "
                "or use a model without experts"
            )
        self._check_sizes(layer.moe_config.moe_parallel_config.tp_size)
        for name in (*self._format.needed, *self._format.ignored):
            for weight in ("w13", "w2"):
                parameter = torch.nn.Parameter(torch.empty(0, device=self._device), requires_grad=False)
                parameter.weight_loader = partial(self._load, layer, name)  # type: ignore[attr-defined]
                layer.register_parameter(f"{weight}_{name}", parameter)
        layer.backplane_experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({projection: torch.nn.Module() for projection in _PROJECTIONS})
            for _ in range(self._experts)
        )

    def _check_sizes(self, workers: int) -> None:
        stored = self._format
        unit = max(stored.group, stored.per_word)
        has_groups = stored.group == -1 or (stored.group > 0 and stored.group % 8 == 0)
        if not has_groups or self._hidden % unit or self._intermediate % unit:
            raise CheckpointError(
                f"the experts of {self._prefix} have {self._hidden} inputs and {self._intermediate} intermediate "
                f"features per worker; both must be multiples of {unit}, and groups must be multiples of 8: choose "
                "another --tensor-parallel-size, or another checkpoint"
            )
        if stored.group_index is not None and workers > 1:
            raise BackplaneError(
                "this GPTQ checkpoint has activation order (desc_act), so its experts cannot be divided among workers; "
                "use --tensor-parallel-size 1"
            )

    def _load(
        self,
        layer: Any,
        name: str,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        if self._processed:
            raise BackplaneError(f"quantized experts ({self._prefix}) cannot be reloaded; restart the server")
        if name in self._format.needed:
            shard = self._shard(layer, name, loaded_weight, shard_id)
            self._loaded.setdefault((expert_id, shard_id), {})[name] = shard
            self._pack_if_complete(layer, expert_id)
        return True if return_success else None

    def _shard(self, layer: Any, name: str, loaded: torch.Tensor, weight: str) -> torch.Tensor:
        """Returns this worker's part of a tensor."""
        stored, parallel = self._format, layer.moe_config.moe_parallel_config
        if name == stored.group_index:
            inputs = self._intermediate * parallel.tp_size if weight == "w2" else self._hidden
            if loaded.shape != (inputs,) or loaded.dtype not in (torch.int32, torch.int64):
                raise CheckpointError(
                    f"the checkpoint has a g_idx of shape {tuple(loaded.shape)} and type {loaded.dtype} for an expert "
                    f"of {self._prefix}, and {inputs} integers are required; download it again"
                )
            return loaded
        if name == stored.scales and stored.is_w8a8 and loaded.numel() == 1:  # one scale for all outputs
            return loaded.reshape(1, 1).expand(self._hidden if weight == "w2" else self._intermediate, 1)
        if loaded.dim() != 2:
            raise CheckpointError(
                f"{self._prefix} has {name} of shape {tuple(loaded.shape)}, and one matrix for each expert is "
                "supported; choose a checkpoint that stores experts separately"
            )
        inputs, outputs = (self._intermediate, self._hidden) if weight == "w2" else (self._hidden, self._intermediate)
        if name == stored.codes:
            if not stored.is_w8a8 and loaded.dtype != torch.int32:
                raise CheckpointError(
                    f"the checkpoint has {name} of type {loaded.dtype} for an expert of {self._prefix}, and int32 is "
                    "required; download it again"
                )
            sizes = [inputs, outputs]
            sizes[1 if stored.packed_dim == stored.output_dim else 0] //= stored.per_word
        else:
            sizes = [1 if stored.group == -1 else inputs // stored.group, outputs]
            if name == stored.zero_points:
                sizes[1] //= stored.per_word
        divided = 1 - stored.output_dim if weight == "w2" else stored.output_dim
        if stored.output_dim == 0:
            sizes.reverse()
        full_sizes = list(sizes)
        if name == stored.codes or weight != "w2" or stored.group != -1:
            full_sizes[divided] *= parallel.tp_size
        if list(loaded.shape) != full_sizes:
            raise CheckpointError(
                f"the checkpoint has {tuple(loaded.shape)} for {name} of an expert of {self._prefix}, and the model's "
                f"configuration requires {tuple(full_sizes)}; download it again"
            )
        if full_sizes == sizes:
            return loaded
        return loaded.narrow(divided, parallel.tp_rank * sizes[divided], sizes[divided])

    def _pack_if_complete(self, layer: Any, expert: int) -> None:
        needed = len(self._format.needed)
        if any(len(self._loaded.get((expert, weight), ())) < needed for weight in ("w1", "w2", "w3")):
            return
        for projection, weights in _PROJECTIONS.items():
            module = layer.backplane_experts[expert][projection]
            self._install(module, [self._loaded.pop((expert, weight)) for weight in weights])
        self._complete.add(expert)
        if len(self._complete) == self._experts:
            release_freed_memory()

    def _install(self, module: Any, parts: list[Mapping[str, torch.Tensor]]) -> None:
        """Packs the weights of a projection into the expert's module, and frees everything else."""
        stored = self._format
        joined = {name: self._joined(name, parts) for name in stored.needed if name != stored.group_index}
        group_indices = [part[stored.group_index] for part in parts] if stored.group_index else []
        with host_memory.without_huge_pages():
            packed, order = self._pack(joined, group_indices)
        module.features = joined[stored.scales].shape[stored.output_dim]
        for copy in joined.values() if len(parts) > 1 else ():
            free_storage(copy)
        install_packed(module, packed)
        module.register_buffer("order", order)
        move_to_huge_pages(packed.codes)

    def _joined(self, name: str, parts: list[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """Returns the concatenated parts, a copy. A single part is returned as it is, a view of the mapped file."""
        tensors = [part[name].to(self._device) for part in parts]
        return torch.cat(tensors, dim=self._format.output_dim) if len(tensors) > 1 else tensors[0]

    def _pack(
        self, joined: Mapping[str, torch.Tensor], group_indices: list[torch.Tensor]
    ) -> tuple[Packed, torch.Tensor | None]:
        """Returns the packed weight and the order of its inputs.

        No reference to the loaded tensors remains, so that they can be freed.
        """
        stored = self._format
        scales = joined[stored.scales]
        require_usable_scales(scales, f"an expert of {self._prefix}")
        if stored.is_w8a8:
            return pack_int8(joined[stored.codes], scales.float()), None
        codes = PackedWords(joined[stored.codes], stored.bits, stored.packed_dim, stored.output_dim, stored.word_order)
        scales = scales if stored.output_dim == 0 else scales.t()
        zero_points = None
        if stored.has_zero_points:
            words = PackedWords(
                joined[stored.zero_points], stored.bits, stored.output_dim, stored.output_dim, stored.word_order
            )
            zero_points = ZeroPoints(words, stored.zero_point_offset)
        per_word = 1 if stored.packed_dim == stored.output_dim else codes.per_word
        fan_in = codes.data.shape[1 - stored.output_dim] * per_word
        order = self._input_order(group_indices, scales.shape[1]) if group_indices else None
        target = runtime().device.quantized_layout(stored.bits)
        return repack(codes, scales, zero_points, fan_in=fan_in, layout=target, order=order), order

    def _input_order(self, group_indices: list[torch.Tensor], groups: int) -> torch.Tensor | None:
        if any(not torch.equal(one, group_indices[0]) for one in group_indices):
            raise CheckpointError(
                f"the gate and up projections of an expert of {self._prefix} have different activation orders (g_idx); "
                "use a checkpoint made with desc_act=False"
            )
        try:
            return grouping_order(group_indices[0].to(self._device), groups)
        except ValueError as error:
            raise CheckpointError(
                f"a g_idx of {self._prefix} is not supported: {error}; use a checkpoint made with desc_act=False"
            ) from error

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks that all experts were loaded, and removes the parameters that vLLM loaded into."""
        if missing := sorted(set(range(self._experts)) - self._complete):
            raise CheckpointError(
                f"the checkpoint has no weights, or not all, for experts {missing[:4]} of {self._prefix}: for example, "
                f"it has no {self._first_missing(layer, missing[0])}; choose a complete one"
            )
        self._processed = True
        for name in (*self._format.needed, *self._format.ignored):
            for weight in ("w13", "w2"):
                if hasattr(layer, f"{weight}_{name}"):
                    delattr(layer, f"{weight}_{name}")
        self._clear_full_weights(layer)
        release_freed_memory()

    def _first_missing(self, layer: Any, expert: int) -> str:
        """Returns the checkpoint's name of the first tensor that an expert lacks."""
        names = zip(("w1", "w3", "w2"), compat.expert_weight_names(layer), strict=True)
        return next(
            f"{self._prefix}.{expert}.{weight_name}.{name}"
            for weight, weight_name in names
            for name in self._format.needed
            if name not in self._loaded.get((expert, weight), ())
        )

    def experts(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        def linear(projection: str, expert: int, tokens: torch.Tensor) -> torch.Tensor:
            module = layer.backplane_experts[expert][projection]
            if module.order is not None:
                tokens = tokens.index_select(-1, module.order)
            return ops.quantized_linear.call(
                tokens, module.weight, module.weight_scale, module.weight_offset, self._format.bits, module.features
            )

        def up(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            return ops.silu_and_mul.call(linear("up", expert, tokens))

        return run_experts(x, weights, ids, self._experts, up, partial(linear, "down"))
