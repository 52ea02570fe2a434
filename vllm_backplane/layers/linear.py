"""Linear layers: unquantized weights are multiplied by the operator `linear`, or by `blocked_linear` where the device
wants them in another order.

vLLM decides in a function which product an unquantized layer uses, with no case for out-of-tree platforms, so the
layer's method object is exchanged after construction. Parameters, sharding and weight loading stay vLLM's.
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
from vllm_backplane.layers.deferred_weights import collect_bias
from vllm_backplane.runtime import runtime


class BackplaneLinearMethod(UnquantizedLinearMethod):
    supports_pre_processed_weights = False  # what another process has arranged does not say how many rows it had

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
        # A convolution kept as a linear layer has three dimensions. vLLM marks what MLA reads by itself for its own CPU
        # platform, which rearranges weights as well.
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
    raise BackplaneError(
        "this weight cannot be loaded into: after loading it was rearranged for the device, or it is the mapped file "
        "itself; use the worker's reload_weights, which prepares the layers for it, or start anew"
    )


class _OnOperators(LinearBase):
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = BackplaneLinearMethod()
        collect_bias(self)


class BackplaneReplicatedLinear(_OnOperators, ReplicatedLinear):
    pass


class BackplaneColumnParallelLinear(_OnOperators, ColumnParallelLinear):
    pass


class BackplaneMergedColumnParallelLinear(_OnOperators, MergedColumnParallelLinear):
    pass


class BackplaneQKVParallelLinear(_OnOperators, QKVParallelLinear):
    pass


class BackplaneRowParallelLinear(_OnOperators, RowParallelLinear):
    pass
