"""Computes unquantized linear layers with the operator `linear`, or `blocked_linear` if the device rearranges weights.

vLLM chooses the GEMM of an unquantized layer in a function that has no case for out-of-tree platforms. These subclasses
therefore replace the layer's quantization method after construction. Parameters, sharding and weight loading stay
vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from vllm_backplane import ops
from vllm_backplane.errors import BackplaneError
from vllm_backplane.guards import guarded
from vllm_backplane.layers.layerwise_loading import defer_bias_loading
from vllm_backplane.runtime import runtime


@guarded(
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply",
    why="an operator computes the layer, with weights in the order of the device",
)
class BackplaneLinearMethod(UnquantizedLinearMethod):
    supports_pre_processed_weights = False  # a rearranged weight does not record how many rows it has

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Rearranges the weight if the device wants another order."""
        weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
        # A convolution stored as a linear layer has three dimensions. vLLM marks the weights that MLA reads directly,
        # for its own CPU platform, which rearranges weights as well.
        if weight.dim() != 2 or getattr(layer, "_cpu_skip_gemm_dispatch", False):
            return
        blocks = runtime().device.arrange_linear(weight)
        if blocks is not None:
            layer.backplane_rows = weight.shape[0]  # type: ignore[assignment]
            layer.weight = torch.nn.Parameter(blocks, requires_grad=False)
            layer.weight.weight_loader = refuse_loading  # type: ignore[attr-defined]

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = getattr(layer, "backplane_rows", None)
        if rows is None:
            return ops.linear.call(x, layer.weight, bias)
        return ops.blocked_linear.call(x, layer.weight, rows, bias)


def refuse_loading(*_args: Any, **_kwargs: Any) -> None:
    """Raises BackplaneError. It is the weight loader of parameters that no longer have the checkpoint's layout."""
    raise BackplaneError(
        "this weight cannot be overwritten: it was rearranged for the device after loading, or it is the mapped file "
        "itself; use the worker's reload_weights, which prepares the layers for new weights, or restart the server"
    )


class _ReplacementOf(type):
    """Makes every instance of the replaced class an instance of its replacement.

    vLLM's LoRA chooses the wrapper of a layer by `isinstance` with the replacement. Layers of classes that vLLM derives
    from the replaced one (routers of experts, the fused first projections of DeepSeek) would fail that check.
    """

    replaced: type

    def __instancecheck__(cls, instance: Any) -> bool:
        # A class that is derived from a replacement has ordinary instances.
        return isinstance(instance, cls.replaced) if "replaced" in vars(cls) else super().__instancecheck__(instance)


class _BackplaneLinear(LinearBase):
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = BackplaneLinearMethod()
        defer_bias_loading(self)


class BackplaneReplicatedLinear(_BackplaneLinear, ReplicatedLinear, metaclass=_ReplacementOf):
    replaced = ReplicatedLinear


class BackplaneColumnParallelLinear(_BackplaneLinear, ColumnParallelLinear, metaclass=_ReplacementOf):
    replaced = ColumnParallelLinear


class BackplaneMergedColumnParallelLinear(_BackplaneLinear, MergedColumnParallelLinear, metaclass=_ReplacementOf):
    replaced = MergedColumnParallelLinear


class BackplaneQKVParallelLinear(_BackplaneLinear, QKVParallelLinear, metaclass=_ReplacementOf):
    replaced = QKVParallelLinear


class BackplaneRowParallelLinear(_BackplaneLinear, RowParallelLinear, metaclass=_ReplacementOf):
    replaced = RowParallelLinear
