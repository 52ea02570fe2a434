"""The declaration of an operator: everything about it in one place.

Each operator lives in the torch library namespace ``backplane``. Its reference is plain PyTorch and is
registered for every device (dispatch key CompositeExplicitAutograd); a device's kernel, registered for
that device's own key, takes precedence. PyTorch's dispatcher does the choosing, so there is nothing of
ours on the hot path.
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
    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)

DEFAULT_TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1e-2),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One set of arguments for an operator, with a label that a failing test can print."""

    label: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SampleSpace:
    """What a sample generator needs: where, in which type, and a seeded source of numbers.

    Numbers are drawn on the host and moved, so every device sees the same inputs.
    """

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        return values.to(dtype or self.dtype).to(self.device)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float32).to(dtype).to(self.device)

    def integers(self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)


SampleGenerator = Callable[[SampleSpace], Iterator[Sample]]


@dataclass(frozen=True, slots=True)
class Operator:
    """A declared operator. Calling it goes through PyTorch's dispatcher."""

    name: str
    schema: str
    family: str
    summary: str
    reference: Callable[..., Any]
    samples: SampleGenerator
    tolerances: Mapping[torch.dtype, Tolerance]
    dtypes: tuple[torch.dtype, ...]
    """Types of the floating-point arguments that samples may be drawn in."""
    call: torch._ops.OpOverload
    reads_values: bool = False
    """Decode steps call it, and its reference goes by what tensors hold, on the host: a captured graph cannot contain
    that."""

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
    """Declare the decorated reference as an operator.

    `schema` is PyTorch's, without the name: ``(Tensor x, float eps) -> Tensor``; mutated arguments carry
    their alias mark, ``Tensor(a!) out``. `fake` computes shapes only; leave it out when the reference
    itself works on meta tensors (no ``.item()``, no branch on data); where it does not for that reason,
    and decode steps call it, say so with `reads_values`.
    """

    def declare(reference: Callable[..., Any]) -> Operator:
        name = reference.__name__
        if name in _operators:
            raise OperatorError(f"operator {name!r} is declared twice: {reference.__module__}")
        if not reference.__doc__:
            raise OperatorError(f"operator {name!r} has no docstring; its first line is what users are shown")
        missing = [d for d in dtypes if d not in tolerances]
        if missing:
            raise OperatorError(f"operator {name!r} states no tolerance for {missing}")
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
    """The fake implementation of an operator that only writes into its arguments."""


def declared() -> Mapping[str, Operator]:
    return dict(_operators)


def get(name: str) -> Operator:
    try:
        return _operators[name]
    except KeyError:
        raise OperatorError(f"no operator {name!r}{nearest(name, _operators)}") from None
