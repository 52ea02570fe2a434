"""Tests every declared operator: documentation, samples, fake implementation and schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from operator_checks import Outcome, as_tuple, pairs, private, restrided, results, run, same_bits, samples, written
from torch._subclasses.fake_tensor import FakeTensorMode

import vllm_backplane.ops
from vllm_backplane.ops.operator import EXACT, NAMESPACE, Operator, Sample, declared

EVERY = [pytest.param(op, id=op.name) for op in declared().values()]


@dataclass(frozen=True)
class Sampled:
    """Holds an operator with its samples in one dtype and what it returned for each. No test writes to them."""

    op: Operator
    dtype: torch.dtype
    samples: list[Sample]
    outcomes: list[Outcome]

    def __iter__(self) -> Iterator[tuple[Sample, Outcome]]:
        return zip(self.samples, self.outcomes, strict=True)


# The scope makes pytest run all tests of one operator and dtype together, so that the operator runs once for all.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param((op, dtype), id=f"{op.name}-{str(dtype).removeprefix('torch.')}")
        for op, dtype in pairs(dict(declared()))
    ],
)
def sampled(request: pytest.FixtureRequest) -> Sampled:
    op, dtype = request.param
    found = samples(op, dtype)
    return Sampled(op, dtype, found, [run(op, sample.args) for sample in found])


@pytest.mark.parametrize("op", EVERY)
def test_declaration_is_complete(op: Operator) -> None:
    assert op.summary
    assert op.summary == op.summary.strip()
    assert op.reference.__doc__
    assert op.dtypes
    assert set(op.dtypes) <= set(op.tolerances)
    assert op.qualified_name == f"{NAMESPACE}::{op.name}"
    assert op.reference.__module__.rpartition(".")[2] == op.family
    assert op.call._schema.name == op.qualified_name
    for tolerance in op.tolerances.values():
        assert 0 <= tolerance.rtol < 1
        assert tolerance.atol >= 0
    assert getattr(vllm_backplane.ops, op.name, None) is op, "vllm_backplane.ops does not export it"


def test_samples_are_several_labelled_and_repeatable(sampled: Sampled) -> None:
    assert len(sampled.samples) >= 3
    labels = [sample.label for sample in sampled.samples]
    assert len(set(labels)) == len(labels), "two samples share a label"
    for one, other in zip(sampled.samples, samples(sampled.op, sampled.dtype), strict=True):
        for a, b in zip(one.args, other.args, strict=True):
            assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b, one.label


def test_fake_agrees_with_reference(sampled: Sampled) -> None:
    for sample, outcome in sampled:
        real = outcome.returned
        with FakeTensorMode() as mode:
            args = tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in sample.args)
            fake = as_tuple(sampled.op(*args))
        assert len(fake) == len(real), sample.label
        for imagined, computed in zip(fake, real, strict=True):
            assert isinstance(imagined, torch.Tensor) == isinstance(computed, torch.Tensor), sample.label
            if isinstance(computed, torch.Tensor):
                assert imagined.shape == computed.shape, sample.label
                assert imagined.dtype == computed.dtype, sample.label
                assert imagined.device == computed.device, sample.label
                if computed.numel():  # the strides of an empty tensor address nothing
                    assert imagined.stride() == computed.stride(), sample.label


def test_only_marked_arguments_are_written(sampled: Sampled) -> None:
    changed: set[int] = set()
    marked = written(sampled.op)
    for sample, outcome in sampled:
        for i, (old, new) in enumerate(zip(sample.args, outcome.args, strict=True)):
            if isinstance(old, torch.Tensor) and not same_bits(old, new):
                assert i in marked, f"{sample.label}: argument {i} changed without an alias mark"
                changed.add(i)
    assert changed == set(marked), "an argument is marked as written, and no sample writes it"


def test_results_share_no_memory_with_arguments(sampled: Sampled) -> None:
    for sample, outcome in sampled:
        given = {a.untyped_storage().data_ptr() for a in outcome.args if isinstance(a, torch.Tensor) and a.numel()}
        for value in outcome.returned:
            if isinstance(value, torch.Tensor) and value.numel():
                assert value.untyped_storage().data_ptr() not in given, sample.label


def test_torch_accepts_the_schema(sampled: Sampled) -> None:
    for sample in sampled.samples:
        if any(isinstance(a, torch.Tensor) and _opcheck_cannot_compare(a) for a in sample.args):
            continue
        # test_fake_agrees_with_reference compares the fake implementation.
        torch.library.opcheck(sampled.op.call, private(sample.args), test_utils="test_schema")


def _opcheck_cannot_compare(tensor: torch.Tensor) -> bool:
    """Returns whether PyTorch's check cannot compare the values: it does not support one-byte floats."""
    return tensor.is_floating_point() and tensor.dtype.itemsize == 1


def test_memory_layout_does_not_matter(sampled: Sampled) -> None:
    op = sampled.op
    for sample, outcome in sampled:
        spread = tuple(restrided(a) if isinstance(a, torch.Tensor) else a for a in sample.args)
        plain, from_spread = results(op, outcome), results(op, run(op, spread))
        assert len(plain) == len(from_spread), sample.label
        for expected, actual in zip(plain, from_spread, strict=True):
            assert actual.dtype == expected.dtype, sample.label
            assert actual.shape == expected.shape, sample.label
            if expected.is_floating_point():
                tolerance = op.tolerances.get(expected.dtype, EXACT)
                torch.testing.assert_close(
                    actual.float(),
                    expected.float(),
                    rtol=tolerance.rtol,
                    atol=tolerance.atol,
                    equal_nan=True,
                    msg=lambda text, label=sample.label: f"{label}: {text}",
                )
            else:
                assert torch.equal(actual, expected), sample.label


def test_same_input_same_result(sampled: Sampled) -> None:
    op = sampled.op
    for sample, outcome in sampled:
        for first, second in zip(results(op, outcome), results(op, run(op, sample.args)), strict=True):
            assert same_bits(first, second), sample.label
