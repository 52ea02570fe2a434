"""Computes unquantized mixture-of-experts layers with the operators `moe_route` and `moe_experts`.

vLLM has no expert kernels for out-of-tree platforms, and its routers call CUDA kernels. vLLM passes the router logits
to a method that declares itself monolithic, and that method routes and computes. Loading, sharding, shared experts and
the exchange between ranks stay vLLM's. A router object of vLLM may do more than the layer's settings describe, so such
routers are refused at construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_backplane import ops
from vllm_backplane.errors import BindingError
from vllm_backplane.guards import guarded
from vllm_backplane.settings import compat

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def _missing_setting(kind: MoEActivation, setting: str) -> BindingError:
    return BindingError(f"activation {kind.value!r} needs {setting}, which the model does not set")


@dataclass(frozen=True, slots=True)
class Activation:
    """Holds the activation arguments of the operator `moe_experts`."""

    name: str
    alpha: float = 1.0
    limit: float | None = None
    beta: float = 0.0

    @classmethod
    def from_config(cls, moe: FusedMoEConfig) -> Activation:
        """Returns the arguments that compute vLLM's activation of a layer. Raises BindingError if there are none."""
        kind = moe.activation
        if kind is MoEActivation.SWIGLUOAI:
            # vLLM computes this activation with fixed constants and ignores the layer's settings.
            return cls("swigluoai", 1.702, 7.0, 1.0)
        if kind is MoEActivation.SWIGLUOAI_UNINTERLEAVE:
            if moe.swiglu_limit is None:
                raise _missing_setting(kind, "swiglu_limit")
            return cls(
                "silu",
                1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha,
                moe.swiglu_limit,
                0.0 if moe.swiglu_beta is None else moe.swiglu_beta,
            )
        if kind is MoEActivation.SWIGLUSTEP:
            return cls("swiglustep", limit=7.0)
        if kind is MoEActivation.SITU:
            if moe.activation_situ_beta is None:
                raise _missing_setting(kind, "activation_situ_beta")
            return cls("situ", alpha=moe.activation_situ_beta, limit=moe.activation_situ_linear_beta)
        if kind is MoEActivation.SILU:
            return cls("silu", limit=moe.swiglu_limit)
        if kind is MoEActivation.RELU2:
            raise BindingError(
                f"activation {kind.value!r} is not defined for experts with a gate, in vLLM and in Backplane; the "
                "model should use 'relu2_no_mul'"
            )
        return cls(kind.value)


@guarded(
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.__init__",
    why="it is not called: it selects expert kernels of other platforms",
    feature="experts",
)
@guarded(
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.supports_eplb",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply_monolithic",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.forward_native",
    why="operators read the weights as they were loaded, and compute the experts",
    feature="experts",
)
@guarded(
    "vllm.model_executor.layers.fused_moe.router.router_factory:create_fused_moe_router",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_router:FusedTopKRouter",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_router:fused_topk",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:FusedTopKBiasRouter",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:fused_topk_bias",
    "vllm.model_executor.layers.fused_moe.router.grouped_topk_router:GroupedTopKRouter",
    "vllm.model_executor.layers.fused_moe.router.grouped_topk_router:grouped_topk",
    "vllm.model_executor.layers.fused_moe.router.custom_routing_router:CustomRoutingRouter",
    why="an operator chooses the experts as these routers do",
    feature="experts",
)
@guarded(
    "vllm.model_executor.layers.fused_moe.activation:MoEActivation",
    "vllm.model_executor.layers.fused_moe.activation:apply_moe_activation",
    why="an operator computes the activation with the same constants",
    feature="experts",
)
class BackplaneFusedMoEMethod(UnquantizedFusedMoEMethod):
    uses_fused_operator = True
    """Whether one call of `moe_experts` computes all experts. Otherwise `quantization/per_expert_moe.py` computes
    them one by one."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        # Skips the parent's constructor, which selects one of vLLM's expert kernels; none is for this platform.
        super(UnquantizedFusedMoEMethod, self).__init__(moe)
        self.unquantized_backend = UnquantizedMoeBackend.OOT
        self.experts_cls = None
        self.supports_pre_processed_weights = True
        self._activation = Activation.from_config(moe)
        if compat.has_hash_routing(moe):
            raise BindingError(
                "Backplane does not support experts that are chosen by a table of token ids (hash routing); choose "
                "another model"
            )
        # Not by `moe.routing_method`: since vLLM 0.33 it is the method that is simulated.
        if envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY:
            raise BindingError(
                "Backplane does not support simulated routing; unset VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
            )

    @property
    def is_monolithic(self) -> bool:
        return True

    @property
    def supports_eplb(self) -> bool:
        """Returns False: expert load balancing is done by vLLM's router, which a monolithic method does not use."""
        return False

    def create_weights(self, layer: RoutedExperts, *args: Any, **kwargs: Any) -> None:
        bias, experts = layer.e_score_correction_bias, self.moe.num_logical_experts
        if bias is not None and bias.shape[0] != experts:
            raise BindingError(
                f"{layer.layer_name} routes to {bias.shape[0]} experts but has weights for {experts}; Backplane does "
                "not support experts without weights (zero experts): choose another model"
            )
        if self.moe.routing_method == RoutingMethodType.Custom and layer.custom_routing_function is None:
            raise BindingError(
                f"{layer.layer_name} uses its own router object, which Backplane cannot call; choose another model"
            )
        super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Does nothing: the operator reads the weights in the layout in which they are loaded."""

    def route(
        self, layer: RoutedExperts, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (weights, global expert ids) for each token, as vLLM's own routers choose them."""
        grouped = (
            layer.use_grouped_topk
            and router_logits.shape[-1] > layer.num_expert_group
            and router_logits.shape[-1] % layer.num_expert_group == 0
        )
        bias = layer.e_score_correction_bias
        if layer.custom_routing_function is not None and not layer.use_grouped_topk:
            weights, ids = layer.custom_routing_function(
                hidden_states=x, gating_output=router_logits, topk=layer.top_k, renormalize=layer.renormalize
            )
            return weights.float(), ids.to(torch.int32)
        # vLLM's router without groups and without a bias leaves the weights unscaled.
        scaled = grouped or bias is not None
        return ops.moe_route.call(
            router_logits,
            layer.top_k,
            layer.renormalize,
            layer.scoring_func,
            bias,
            layer.num_expert_group if grouped else 0,
            layer.topk_group if grouped else 0,
            layer.routed_scaling_factor if scaled else 1.0,
        )

    def experts(self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        biased = self.moe.has_bias
        return ops.moe_experts.call(
            x,
            layer.w13_weight,
            layer.w2_weight,
            weights,
            ids,
            self._activation.name,
            layer.w13_bias if biased else None,
            layer.w2_bias if biased else None,
            layer.expert_map,
            layer.apply_router_weight_on_input,
            self._activation.alpha,
            self._activation.limit,
            self._activation.beta,
        )

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights, ids = self.route(layer, x, router_logits)
        return self.experts(layer, x, weights, ids)

    def forward_native(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.experts(layer, x, topk_weights, topk_ids)
