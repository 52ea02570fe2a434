"""Runs an operator on a private copy of a sample and compares the results, for the operator tests.

Expected values are numpy float64, computed by formulas in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_backplane.ops.operator import Operator, Sample, SampleSpace

CPU = torch.device("cpu")
HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (torch.float32, *HALF_TYPES)

ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative tolerance of each dtype: two roundings (float32: more, for sums). It is tighter than that for kernels."""


def space(dtype: torch.dtype, seed: int = 0) -> SampleSpace:
    return SampleSpace(CPU, dtype, torch.Generator().manual_seed(seed))


def samples(operator: Operator, dtype: torch.dtype) -> list[Sample]:
    return list(operator.samples(space(dtype)))


def private(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a deep copy with the same strides, in which views of one storage remain views of one storage."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        ours = storages.setdefault(storage._cdata, storage.clone())
        return torch.empty(0, dtype=value.dtype).set_(ours, value.storage_offset(), value.shape, value.stride())

    return tuple(copy(value) for value in args)


def written(operator: Operator) -> list[int]:
    """Returns the indices of the arguments that the operator writes to, according to its schema."""
    arguments = operator.call._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def as_tuple(result: Any) -> tuple[Any, ...]:
    if result is None:
        return ()
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@dataclass(frozen=True)
class Outcome:
    returned: tuple[Any, ...]
    args: tuple[Any, ...]
    """The operator's arguments after the call."""


def run(operator: Operator, args: tuple[Any, ...]) -> Outcome:
    mine = private(args)
    return Outcome(as_tuple(operator(*mine)), mine)


def results(operator: Operator, outcome: Outcome) -> list[torch.Tensor]:
    """Returns all results of the operator: the returned tensors, then the arguments that it wrote to."""
    produced = [*outcome.returned, *(outcome.args[i] for i in written(operator) if i < len(outcome.args))]
    return [value for value in produced if isinstance(value, torch.Tensor)]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))


def exact(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().double().numpy() if tensor.dtype.itemsize == 1 else tensor.double().numpy()


def assert_near(
    actual: torch.Tensor,
    expected: np.ndarray,
    label: str,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    bound = ROUNDING.get(actual.dtype, 0.0)
    assert tuple(actual.shape) == expected.shape, label
    np.testing.assert_allclose(
        exact(actual),
        expected,
        rtol=bound if rtol is None else rtol,
        atol=bound if atol is None else atol,
        err_msg=label,
    )


def check_over_samples(
    operator: Operator, dtype: torch.dtype, formula: Callable[..., np.ndarray | tuple[np.ndarray, ...]]
) -> None:
    """Compares the operator's results with `formula` on every sample; `formula` gets tensors as float64."""
    for sample in samples(operator, dtype):
        expected = formula(*(exact(a) if isinstance(a, torch.Tensor) else a for a in sample.args))
        outcome = run(operator, sample.args)
        wanted = expected if isinstance(expected, tuple) else (expected,)
        assert len(outcome.returned) == len(wanted), sample.label
        for actual, value in zip(outcome.returned, wanted, strict=True):
            floats = [a for a in sample.args if isinstance(a, torch.Tensor) and a.is_floating_point()]
            assert actual.dtype == floats[0].dtype, sample.label
            assert_near(actual, value, sample.label)


def restrided(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same values in rows that are further apart and do not begin at the start of the storage."""
    if tensor.dim() < 2:
        return tensor
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 3)
    bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor
    spread = torch.zeros(shape, dtype=bits.dtype)
    spread[..., 1:-2] = bits
    return spread.view(tensor.dtype)[..., 1:-2]


def pairs(operators: dict[str, Operator]) -> Iterator[tuple[Operator, torch.dtype]]:
    for operator in operators.values():
        for dtype in operator.dtypes:
            yield operator, dtype
