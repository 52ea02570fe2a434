"""Experts of a mixture with weights of 4 or 8 bits from a GPTQ, AWQ or compressed-tensors checkpoint.

vLLM's methods for them choose among its own kernels, of which none is for out-of-tree platforms. Here what the
checkpoint has for an expert is collected, and packed as soon as all of it is there. So of the checkpoint's form no more
is in memory than what has been read for experts that are not complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from vllm_backplane import ops
from vllm_backplane.device import host
from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.layers.moe import BackplaneFusedMoEMethod
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization.checkpoint.repacking import Words, Zeros, adjacent, repacked
from vllm_backplane.quantization.checkpoint.w8a8_int8 import packed
from vllm_backplane.quantization.online.linear import empty, install, into_huge_pages
from vllm_backplane.quantization.per_expert_linear import computed
from vllm_backplane.runtime import runtime
from vllm_backplane.settings import compat

_PRODUCTS = {"up": ("w1", "w3"), "down": ("w2",)}
"""The weights of an expert, as vLLM calls them, by the product that they are part of."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint stores the weight of one expert."""

    bits: int
    group: int
    """-1: a scale per output."""
    codes: str
    """The last part of the tensor's name; so for the others."""
    scales: str
    zeros: str
    has_zeros: bool
    output: int
    """The dimension of output features, in all of these tensors."""
    packed: int
    """The dimension along which a word of codes has several; for zero points that is the output."""
    order: tuple[int, ...] = ()
    zeros_less: int = 0
    groups_of: str | None = None
    """The tensor that names the group of each input, where the order is not the plain one."""
    beside: tuple[str, ...] = ()
    """Tensors that are not needed."""
    plain: bool = False
    """Codes are int8, one by one; inputs are rounded to 8 bits with one scale per token."""

    @property
    def per_word(self) -> int:
        return 1 if self.plain else 32 // self.bits

    @property
    def needed(self) -> tuple[str, ...]:
        zeros = (self.zeros,) if self.has_zeros else ()
        return (self.codes, self.scales, *zeros, *((self.groups_of,) if self.groups_of else ()))


class SchemeMoEMethod(BackplaneFusedMoEMethod):
    one_operator = False
    uses_meta_device = True  # vLLM's check of what was loaded leaves the layer out: it insists on its experts itself

    def __init__(self, moe: FusedMoEConfig, prefix: str, layout: Layout) -> None:
        super().__init__(moe)
        if moe.activation is not MoEActivation.SILU or moe.has_bias:
            raise BackplaneError(
                f"the experts of {prefix} have biases or the activation {moe.activation.value!r}; of quantized "
                "checkpoints, experts with SiLU and no bias are served: use a full-precision one"
            )
        self._prefix, self._layout = prefix, layout
        self._parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        self._complete: set[int] = set()
        self._processed = False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        if layer.expert_map is not None:
            raise BackplaneError("quantized experts are not spread over workers; remove --enable-expert-parallel")
        if layer.apply_router_weight_on_input:
            raise BackplaneError(f"{self._prefix} weighs the inputs of experts, which is served in full precision only")
        if get_current_vllm_config().load_config.load_format == "dummy":
            raise BackplaneError(
                f"--load-format dummy makes no weights for the quantized experts of {self._prefix}; load a checkpoint, "
                "or take a model without experts"
            )
        self._device = torch.empty(0).device
        self._experts, self._hidden = kwargs["num_experts"], kwargs["hidden_size"]
        self._width = kwargs["intermediate_size_per_partition"]
        self._insist_on_fit(layer.moe_config.moe_parallel_config.tp_size)
        with torch.device("meta"):
            super().create_weights(layer, *args, **kwargs)
        for name in (*self._layout.needed, *self._layout.beside):
            for weight in ("w13", "w2"):
                holder = torch.nn.Parameter(torch.empty(0, device=self._device), requires_grad=False)
                holder.weight_loader = partial(self._load, layer, name)  # type: ignore[attr-defined]
                layer.register_parameter(f"{weight}_{name}", holder)
        layer.backplane_experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({product: torch.nn.Module() for product in _PRODUCTS}) for _ in range(self._experts)
        )

    def _insist_on_fit(self, workers: int) -> None:
        layout = self._layout
        unit = max(layout.group, layout.per_word)
        if (layout.group != -1 and layout.group % 8) or self._hidden % unit or self._width % unit:
            raise CheckpointError(
                f"the experts of {self._prefix} have {self._hidden} inputs and each worker's share is {self._width} "
                f"features, of which one is no multiple of {unit}, or groups are no multiple of 8; choose another "
                "--tensor-parallel-size, or another checkpoint"
            )
        if layout.groups_of is not None and workers > 1:
            raise BackplaneError(
                "this GPTQ checkpoint orders weights by activation (desc_act), which cannot be divided among workers; "
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
            raise BackplaneError(f"quantized experts ({self._prefix}) cannot be loaded again; start anew")
        if name in self._layout.needed:
            self._parts.setdefault((expert_id, shard_id), {})[name] = self._share(layer, name, loaded_weight, shard_id)
            self._finish_if_complete(layer, expert_id)
        return True if return_success else None

    def _share(self, layer: Any, name: str, loaded: torch.Tensor, shard: str) -> torch.Tensor:
        """This worker's part of a tensor."""
        layout, split = self._layout, layer.moe_config.moe_parallel_config
        if name == layout.groups_of:
            return loaded
        if name == layout.scales and layout.plain and loaded.numel() == 1:
            return loaded.reshape(1, 1).expand(self._hidden if shard == "w2" else self._width, 1)  # one for all outputs
        if loaded.dim() != 2:
            raise CheckpointError(
                f"{self._prefix} has {name} of shape {tuple(loaded.shape)}, where a matrix for each expert is served; "
                "choose a checkpoint that stores experts one by one"
            )
        inputs, outputs = (self._width, self._hidden) if shard == "w2" else (self._hidden, self._width)
        if name == layout.codes:
            sizes = [inputs, outputs]
            sizes[1 if layout.packed == layout.output else 0] //= layout.per_word
        else:
            sizes = [1 if layout.group == -1 else inputs // layout.group, outputs]
            if name == layout.zeros:
                sizes[1] //= layout.per_word
        divided = 1 - layout.output if shard == "w2" else layout.output
        if layout.output == 0:
            sizes.reverse()
        whole = list(sizes)
        if name == layout.codes or shard != "w2" or layout.group != -1:
            whole[divided] *= split.tp_size
        if list(loaded.shape) != whole:
            raise CheckpointError(
                f"the checkpoint has {tuple(loaded.shape)} for {name} of an expert of {self._prefix}, and the model's "
                f"configuration asks for {tuple(whole)}; fetch it again"
            )
        if whole == sizes:
            return loaded
        return loaded.narrow(divided, split.tp_rank * sizes[divided], sizes[divided])

    def _finish_if_complete(self, layer: Any, expert: int) -> None:
        needed = len(self._layout.needed)
        if any(len(self._parts.get((expert, shard), ())) < needed for shard in ("w1", "w2", "w3")):
            return
        for product, shards in _PRODUCTS.items():
            holder = layer.backplane_experts[expert][product]
            self._install(holder, [self._parts.pop((expert, one)) for one in shards])
        self._complete.add(expert)
        if len(self._complete) == self._experts:
            # Freed memory between codes that stay would add up from layer to layer.
            runtime().device.empty_cache()

    def _install(self, holder: Any, parts: list[Mapping[str, torch.Tensor]]) -> None:
        """Packed weights in the expert's own module, and nothing else left in memory."""
        layout = self._layout
        joined = {name: self._joined(name, parts) for name in layout.needed if name != layout.groups_of}
        groups_of = [part[layout.groups_of] for part in parts] if layout.groups_of else []
        with host.without_huge_pages():
            made, order = self._packed(joined, groups_of)
        holder.features = joined[layout.scales].shape[layout.output]
        for copy in joined.values() if len(parts) > 1 else ():
            empty(copy)
        install(holder, made)
        holder.register_buffer("order", order)
        into_huge_pages(made.codes)

    def _joined(self, name: str, parts: list[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """A copy; of a single part the tensor itself, which is where the file is mapped."""
        tensors = [part[name].to(self._device) for part in parts]
        return torch.cat(tensors, dim=self._layout.output) if len(tensors) > 1 else tensors[0]

    def _packed(
        self, joined: Mapping[str, torch.Tensor], groups_of: list[torch.Tensor]
    ) -> tuple[Packed, torch.Tensor | None]:
        """And the order of inputs. Nothing of what was loaded is held on to when it returns."""
        layout = self._layout
        scales = joined[layout.scales]
        if layout.plain:
            return packed(joined[layout.codes], scales.float()), None
        codes = Words(joined[layout.codes], layout.bits, layout.packed, layout.output, layout.order)
        scales = scales if layout.output == 0 else scales.t()
        zeros = None
        if layout.has_zeros:
            words = Words(joined[layout.zeros], layout.bits, layout.output, layout.output, layout.order)
            zeros = Zeros(words, layout.zeros_less)
        fan_in = codes.data.shape[1 - layout.output] * (1 if layout.packed == layout.output else codes.per_word)
        order = self._order(groups_of, scales.shape[1]) if groups_of else None
        target = runtime().device.quantized_layout(layout.bits)
        return repacked(codes, scales, zeros, fan_in=fan_in, layout=target, order=order), order

    def _order(self, groups_of: list[torch.Tensor], groups: int) -> torch.Tensor | None:
        if any(not torch.equal(one, groups_of[0]) for one in groups_of):
            raise CheckpointError(
                f"gate and up projections of an expert of {self._prefix} are ordered by activation in different ways; "
                "use a checkpoint made with desc_act=False"
            )
        try:
            return adjacent(groups_of[0].to(self._device), groups)
        except ValueError as fault:
            raise CheckpointError(
                f"a g_idx of {self._prefix} cannot be served: {fault}; use a checkpoint made with desc_act=False"
            ) from fault

    def process_weights_after_loading(self, layer: Any) -> None:
        if missing := sorted(set(range(self._experts)) - self._complete):
            raise CheckpointError(
                f"the checkpoint has no weights, or not all, for experts {missing[:4]} of {self._prefix}, for one no "
                f"{self._first_missing(layer, missing[0])}; choose a complete one"
            )
        self._processed = True
        for name in (*self._layout.needed, *self._layout.beside):
            for weight in ("w13", "w2"):
                if hasattr(layer, f"{weight}_{name}"):
                    delattr(layer, f"{weight}_{name}")
        for name in ("w13_weight", "w2_weight"):
            setattr(layer, name, torch.nn.Parameter(torch.empty(0, device=self._device), requires_grad=False))
        runtime().device.empty_cache()

    def _first_missing(self, layer: Any, expert: int) -> str:
        parts = zip(("w1", "w3", "w2"), compat.expert_parts(layer), strict=True)
        return next(
            f"{self._prefix}.{expert}.{part}.{name}"
            for shard, part in parts
            for name in self._layout.needed
            if name not in self._parts.get((expert, shard), ())
        )

    def experts(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        def product(name: str, expert: int, tokens: torch.Tensor) -> torch.Tensor:
            one = layer.backplane_experts[expert][name]
            if one.order is not None:
                tokens = tokens.index_select(-1, one.order)
            return ops.quantized_linear.call(
                tokens, one.weight, one.weight_scale, one.weight_offset, self._layout.bits, one.features
            )

        def up(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            return ops.silu_and_mul.call(product("up", expert, tokens))

        return computed(x, weights, ids, self._experts, up, partial(product, "down"))
