"""Tests that each binding and hook fits the installed vLLM, and that bound layers call Backplane's operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.ir import enable_torch_wrap
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import activation, layernorm, linear
from vllm.platforms import current_platform

from vllm_backplane.binding import operator_callers
from vllm_backplane.binding import registry as binding
from vllm_backplane.binding.operator_callers import HOOKS
from vllm_backplane.binding.registry import BINDINGS, Binding, bind, check
from vllm_backplane.errors import BindingError
from vllm_backplane.layers import activation as our_activation
from vllm_backplane.layers.norm import BackplaneGemmaRMSNorm

SILU = next(each for each in BINDINGS if each.layer == "SiluAndMul")


class Called(TorchDispatchMode):
    """Records Backplane's operators that PyTorch's dispatcher runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "backplane":
            self.names.append(func._schema.name.removeprefix("backplane::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def bound() -> Iterator[None]:
    assert getattr(type(current_platform), "is_backplane", False), "vLLM is on another platform"
    bind()
    current_platform.import_ir_kernels()
    config = VllmConfig()
    with set_current_vllm_config(config), config.kernel_config.ir_op_priority.set_priority():
        yield


@pytest.fixture
def alone(bound, tmp_path) -> Iterator[None]:
    """Initializes a group of one worker: parameters read their rank."""
    parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize("each", BINDINGS, ids=lambda each: each.layer)
def test_every_layer_exists_and_can_be_replaced(each):
    upstream, replacement = check(each)
    assert issubclass(replacement, upstream)
    assert upstream.__module__ == each.upstream.partition(":")[0], "re-exported from elsewhere; name its own module"
    assert upstream.__name__ == each.layer


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.layer)
def test_every_hook_fits(hook):
    operator_callers.check(hook)


def test_names_are_bound_once():
    layers = [each.layer for each in BINDINGS]
    assert len(layers) == len(set(layers))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"upstream": "vllm.model_executor.layers.activation:SiluAndMull"}, ["SiluAndMull", "does not exist"]),
        ({"upstream": "vllm.model_executor.layers.activations:SiluAndMul"}, ["layers.activations", "cannot be bound"]),
        ({"upstream": "vllm.config:VllmConfig"}, ["vllm.config:VllmConfig", "can no longer be replaced"]),
        ({"replacement": "vllm_backplane.layers.norm:BackplaneGemmaRMSNorm"}, ["norm:Backplane", "not a subclass"]),
        ({"replacement": "vllm_backplane.layers.norm:Backplane"}, ["vllm_backplane.layers.norm:Backplane"]),
    ],
)
def test_a_binding_that_binds_to_nothing_is_refused(change, words):
    with pytest.raises(BindingError) as fault:
        check(dataclasses.replace(SILU, **change))
    for word in words:
        assert word in str(fault.value)


def test_a_class_under_another_name_is_refused(monkeypatch):
    """vLLM looks replacements up by the class's `__name__`."""
    monkeypatch.setattr(activation, "SwishAndMul", activation.SiluAndMul, raising=False)
    with pytest.raises(BindingError, match="is named 'SiluAndMul'"):
        check(dataclasses.replace(SILU, upstream="vllm.model_executor.layers.activation:SwishAndMul"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"upstream": "vllm.v1.sample.sampler:Samplr"}, "Samplr"),
        ({"replacement": "vllm_backplane.lora.punica:BackplanePunicaWrapper"}, "not a subclass"),
    ],
)
def test_a_hook_on_nothing_is_refused(change, word):
    sampler = next(hook for hook in HOOKS if hook.layer == "Sampler")
    with pytest.raises(BindingError, match=word):
        operator_callers.check(dataclasses.replace(sampler, **change))


def test_a_kernel_or_ir_operator_that_is_gone_is_refused():
    for kind in (operator_callers.RUNNER_KERNEL, operator_callers.IR_OPERATOR):
        hook = next(each for each in HOOKS if each.kind == kind)
        with pytest.raises(BindingError, match="gone_away"):
            operator_callers.check(dataclasses.replace(hook, upstream=hook.upstream.partition(":")[0] + ":gone_away"))


def test_binding_twice_is_binding_once(bound):
    before = dict(op_registry_oot)
    assert {each.layer for each in BINDINGS} <= set(before)
    bind()
    assert op_registry_oot == before


def test_a_layer_that_another_plugin_replaced_is_refused(bound, monkeypatch):
    class Theirs(activation.SiluAndMul):
        pass

    monkeypatch.setitem(op_registry_oot, "SiluAndMul", Theirs)
    with pytest.raises(BindingError, match=r"already replaced by .*Theirs; uninstall one of the two plugins"):
        bind()


def test_one_that_does_not_fit_stops_all(bound, monkeypatch):
    monkeypatch.setattr(binding, "BINDINGS", (*BINDINGS, Binding("vllm.nowhere:Nothing", SILU.replacement, (), "")))
    with pytest.raises(BindingError, match=r"vllm\.nowhere:Nothing"):
        bind()


def test_names_by_which_users_switch_operators_stay(bound):
    assert our_activation.BackplaneSiluAndMul.name == "silu_and_mul"
    for each in BINDINGS:
        upstream, replacement = check(each)
        if issubclass(upstream, CustomOp):
            assert replacement.name == upstream.name


def test_vllms_activation_is_ours_and_reaches_the_operator(bound):
    layer = activation.SiluAndMul()
    assert type(layer) is our_activation.BackplaneSiluAndMul
    x = torch.randn(3, 8)
    with Called() as called:
        y = layer(x)
    assert called.names == ["silu_and_mul"]
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(y.double(), gate / (1 + torch.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


def test_vllms_rms_norm_reaches_the_operator_without_a_class_of_ours(bound):
    layer = layernorm.RMSNorm(16, eps=1e-5)
    assert type(layer) is layernorm.RMSNorm
    x, residual = torch.randn(2, 16), torch.randn(2, 16)
    # vLLM's wrapping of IR operators for compilation is disabled: nothing inside of it can be recorded.
    with enable_torch_wrap(False), Called() as called:
        y = layer(x.clone())
        z, summed = layer(x.clone(), residual.clone())
    assert called.names == ["rms_norm", "fused_add_rms_norm"]

    def norm(value: torch.Tensor) -> torch.Tensor:
        value = value.double()
        return value / ((value**2).sum(-1, keepdim=True) / 16 + 1e-5).sqrt()

    torch.testing.assert_close(y.double(), norm(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(summed, x + residual)
    torch.testing.assert_close(z.double(), norm(x + residual), rtol=1e-5, atol=1e-6)


def test_vllms_gemma_norm_is_ours(bound):
    layer = layernorm.GemmaRMSNorm(8)
    assert type(layer) is BackplaneGemmaRMSNorm
    with Called() as called:
        layer(torch.randn(2, 8))
    assert called.names == ["gemma_rms_norm"]


def test_vllms_linear_layer_multiplies_with_the_operator(alone):
    layer = linear.ReplicatedLinear(8, 4, bias=False, params_dtype=torch.float32)
    weight = torch.randn(4, 8)
    layer.weight.data.copy_(weight)
    x = torch.randn(3, 8)
    with Called() as called:
        y, _ = layer(x)
    assert called.names == ["linear"]
    expected = (x.double()[:, None, :] * weight.double()[None]).sum(-1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
