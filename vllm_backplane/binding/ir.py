"""Implements vLLM's IR operators for RMSNorm with Backplane's operators, so that RMSNorm needs no subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from vllm import ir as vllm_ir

from vllm_backplane import ops
from vllm_backplane.errors import BindingError
from vllm_backplane.guards import guarded
from vllm_backplane.settings.releases import INSTALL_SUPPORTED

if TYPE_CHECKING:
    from vllm.config.kernel import IrOpPriorityConfig

PROVIDER = "backplane"
BOUND: dict[str, tuple[str, ...]] = {"rms_norm": ("rms_norm",), "fused_add_rms_norm": ("fused_add_rms_norm",)}
"""Names of vLLM's IR operators, and the operators of Backplane that each implementation calls."""


@guarded("vllm.ir.ops.layernorm:rms_norm", why="an operator computes the same")
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return ops.rms_norm.call(x, weight, epsilon, variance_size)


@guarded("vllm.ir.ops.layernorm:fused_add_rms_norm", why="an operator computes the same")
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    return ops.fused_add_rms_norm.call(x, x_residual, weight, epsilon, variance_size)


def register() -> None:
    """Registers the implementations with vLLM, once per process. Raises BindingError if an IR operator is gone."""
    implementations = {"rms_norm": rms_norm, "fused_add_rms_norm": fused_add_rms_norm}
    for name in BOUND:
        operator = getattr(vllm_ir.ops, name, None)
        if operator is None:
            raise BindingError(
                f"the installed vLLM has no IR operator {name!r}, so RMSNorm would not reach the device. "
                f"{INSTALL_SUPPORTED}"
            )
        if PROVIDER not in operator.impls:
            operator.register_impl(PROVIDER)(implementations[name])


def priority() -> IrOpPriorityConfig:
    """Returns the priority with which vLLM prefers these implementations to its native ones."""
    from vllm.config.kernel import IrOpPriorityConfig

    register()
    return IrOpPriorityConfig.with_default(["native"], **{name: [PROVIDER, "native"] for name in BOUND})
