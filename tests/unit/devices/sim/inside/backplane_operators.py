"""Compares every sample of every operator of Backplane on the card with its reference on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import sim
from torch import Tensor

import vllm_backplane.ops
from vllm_backplane.cli.ops import fell_back
from vllm_backplane.devices.sim.library import runtime
from vllm_backplane.devices.sim.settings import FALLBACK
from vllm_backplane.ops.operator import Operator, Sample, SampleSpace, declared
from vllm_backplane.ops.resolution import has_kernel

CARD = torch.device("bpnpu", 0)
HOST = torch.device("cpu")

EVERY = [
    pytest.param(op, dtype, id=f"{op.name}-{str(dtype).removeprefix('torch.')}")
    for op in declared().values()
    for dtype in op.dtypes
]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for item in value for one in tensors(item)] if isinstance(value, (list, tuple)) else []


def moved(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the same arguments on the card, with the same strides; views of one storage stay views of one storage."""
    storages: dict[int, Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage).to(CARD)
        ours = storages[storage._cdata].untyped_storage()
        return torch.empty(0, dtype=value.dtype, device=CARD).set_(
            ours, value.storage_offset(), value.shape, value.stride()
        )

    return tuple(move(value) for value in args)


@pytest.mark.parametrize(("op", "dtype"), EVERY)
def test_same_as_the_reference(op: Operator, dtype: torch.dtype) -> None:
    tolerance = op.tolerances[dtype]
    for sample in op.samples(SampleSpace(HOST, dtype, torch.Generator().manual_seed(0))):
        theirs, ours = sample.args, moved(sample.args)
        got = tensors(op.call(*ours))
        expected = tensors(op.reference(*theirs))
        assert len(got) == len(expected)
        pairs = [*zip(got, expected, strict=True)]
        pairs += [(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, Tensor)]
        for a, b in pairs:
            assert a.device == CARD, sample.label
            bits = a.dtype.itemsize == 1 and a.dtype.is_floating_point
            torch.testing.assert_close(
                a.cpu().float() if bits else a.cpu(),
                b.float() if bits else b,
                rtol=max(tolerance.rtol, 2**-3 if bits else 0),
                atol=tolerance.atol,
                equal_nan=True,
                msg=lambda text, label=sample.label: f"{label}: {text}",
            )


def test_kernels_of_the_cpu_are_launched_for_the_card() -> None:
    native = [name for name in declared() if has_kernel(name, "CPU")]
    assert len(native) >= 25
    assert [name for name in native if not has_kernel(name, "PrivateUse1")] == []
    assert "libbackplane_cpu.so" in sim.kernel_provider()


def test_a_launch_uses_the_cpu_kernel_and_no_other_operator() -> None:
    x = torch.ones(2, 8, device=CARD)
    torch.bpnpu.synchronize()
    torch.bpnpu.reset_operators()
    before = torch.bpnpu.launch_counters()["launches"]
    vllm_backplane.ops.silu_and_mul.call(x)
    vllm_backplane.ops.rms_norm.call(x, None, 1e-5, None)
    vllm_backplane.ops.linear.call(x, x, None)
    assert torch.bpnpu.operators()["launched"] == {
        "backplane::linear": 1,
        "backplane::rms_norm": 1,
        "backplane::silu_and_mul": 1,
    }
    assert torch.bpnpu.launch_counters()["launches"] == before + 3


def test_arguments_that_do_not_fit_are_refused_by_the_card_itself() -> None:
    """The dispatcher calls C++ directly; a Python implementation would cost more than the launch at every call."""
    x = torch.ones(2, 16, device=CARD)
    codes, scales = torch.zeros(1, 4, 8, 4, dtype=torch.uint8, device=CARD), torch.ones(1, 1, 8, device=CARD)
    ops = vllm_backplane.ops
    for call, message in (
        (lambda: ops.linear.call(x, x[:, :8], None), "linear: input of"),
        (lambda: ops.blocked_linear.call(x, torch.ones(1, 8, 15, device=CARD), 5, None), "blocked_linear: input of"),
        (lambda: ops.blocked_linear.call(x, torch.ones(1, 8, 16, device=CARD), 9, None), "with 9 output features"),
        (lambda: ops.quantized_linear.call(x, codes, scales, None, 8, 9, None), "with 9 output features of 8 bits"),
        (lambda: ops.quantized_linear.call(x, codes[:, :3], scales, None, 8, 8, None), "quantized_linear: input of"),
        (lambda: ops.quantized_linear.call(x, codes, scales, None, 3, 8, None), "of 3 bits"),
        (lambda: ops.greedy_argmax.call(x[0]), "greedy_argmax: expected .rows, columns."),
    ):
        with pytest.raises(RuntimeError, match=f"backplane::.*{message}"):
            call()


def test_what_the_host_does_is_counted_and_reported() -> None:
    operator = dataclasses.replace(
        declared()["linear"],
        reference=lambda x: torch.linalg.svdvals(x),
        samples=lambda space: iter([Sample("one", (space.normal(3, 3),)), Sample("two", (space.normal(4, 2),))]),
    )
    with pytest.raises(RuntimeError, match=r"linalg_svd.* has no implementation on bpnpu, and .* forbidden"):
        fell_back(sim, operator)
    runtime("set_fallback", FALLBACK.index("allow"))
    try:
        counts = fell_back(sim, operator)
    finally:
        runtime("set_fallback", FALLBACK.index("forbid"))
    assert len(counts) == 1
    assert set(counts.values()) == {2}
    assert fell_back(sim, declared()["apply_penalties"]) == {}
