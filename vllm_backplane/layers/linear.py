"""Linear layers: unquantized weights are multiplied by the operator `linear`.

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


class BackplaneLinearMethod(UnquantizedLinearMethod):
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear.call(x, layer.weight, bias)


class _OnOperators(LinearBase):
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = BackplaneLinearMethod()


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
