"""Declares operators: schema, reference, fake implementation, tolerances and samples, together in one place.

Each operator is in the torch library namespace ``backplane``. Its reference is plain PyTorch and is
registered for every device (dispatch key CompositeExplicitAutograd); a device's kernel, registered for
that device's own key, takes precedence. PyTorch's dispatcher makes the choice, so Backplane adds no code to
the hot path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_backplane.errors import OperatorError, nearest

NAMESPACE = "backplane"

_library = torch.library.Library(NAMESPACE, "DEF")
_operators: dict[str, Operator] = {}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits how far a kernel's results may differ from the reference's."""

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)
FLOAT32 = (torch.float32,)
"""Dtypes of an operator on integers or on float32 alone."""
FLOAT32_EXACT: Mapping[torch.dtype, Tolerance] = {torch.float32: EXACT}

DEFAULT_TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1e-2),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds one set of arguments for an operator, with a label for the report of a failing test."""

    label: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SampleSpace:
    """Creates the tensors of samples for one device and dtype, with a seeded random generator.

    Numbers are drawn on the host and then moved, so every device gets the same inputs.
    """

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns normally distributed numbers."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        return values.to(dtype or self.dtype).to(self.device)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns uniformly distributed numbers between 0 and 1."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float32).to(dtype).to(self.device)

    def integers(self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Returns random integers from `low` to `high` - 1."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        """Returns the given values as a tensor."""
        return torch.tensor(values, dtype=dtype).to(self.device)


SampleGenerator = Callable[[SampleSpace], Iterator[Sample]]


@dataclass(frozen=True, slots=True)
class Operator:
    """Describes a declared operator. A call of it goes through PyTorch's dispatcher."""

    name: str
    schema: str
    family: str
    summary: str
    reference: Callable[..., Any]
    samples: SampleGenerator
    tolerances: Mapping[torch.dtype, Tolerance]
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of the floating-point arguments for which there are samples."""
    call: torch._ops.OpOverload
    reads_values: bool = False
    """Whether decode steps call it and its reference reads tensor values on the host. A captured graph cannot contain
    such a reference."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def qualified_name(self) -> str:
        return f"{NAMESPACE}::{self.name}"


def operator(
    schema: str,
    *,
    samples: SampleGenerator,
    fake: Callable[..., Any] | None = None,
    tolerances: Mapping[torch.dtype, Tolerance] = DEFAULT_TOLERANCES,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16),
    reads_values: bool = False,
) -> Callable[[Callable[..., Any]], Operator]:
    """Declares the decorated reference as an operator.

    `schema` is PyTorch's, without the name: ``(Tensor x, float eps) -> Tensor``; mutated arguments have an
    alias annotation, ``Tensor(a!) out``. `fake` computes shapes only; leave it out if the reference itself
    works on meta tensors (no ``.item()``, no branch on data). If the reference reads values on the host and
    decode steps call the operator, set `reads_values`.
    """

    def declare(reference: Callable[..., Any]) -> Operator:
        name = reference.__name__
        if name in _operators:
            raise OperatorError(f"operator {name!r} is declared twice, again in {reference.__module__}; rename one")
        if not reference.__doc__:
            raise OperatorError(f"operator {name!r} has no docstring; add one, its first line is shown to users")
        missing = [d for d in dtypes if d not in tolerances]
        if missing:
            raise OperatorError(f"operator {name!r} has no tolerance for {missing}; add one")
        _library.define(name + schema)
        _library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake or reference, lib=_library)
        declared = Operator(
            name=name,
            schema=schema,
            family=reference.__module__.rpartition(".")[2],
            summary=inspect.getdoc(reference).splitlines()[0],  # type: ignore[union-attr]
            reference=reference,
            samples=samples,
            tolerances=tolerances,
            dtypes=dtypes,
            call=getattr(getattr(torch.ops, NAMESPACE), name).default,
            reads_values=reads_values,
        )
        _operators[name] = declared
        return declared

    return declare


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Does nothing, as the fake implementation of an operator that only writes into its arguments."""


def declared() -> Mapping[str, Operator]:
    """Returns all declared operators by name."""
    return dict(_operators)


def operator_named(name: str) -> Operator:
    """Returns an operator by name; raises an OperatorError with the nearest name if there is none."""
    try:
        return _operators[name]
    except KeyError:
        raise OperatorError(f"unknown operator {name!r}{nearest(name, _operators)}") from None
