"""Resolves which implementation each operator has on a device, and freezes the result at start-up.

PyTorch's dispatcher chooses at each call. This table only reads what it will choose, so that users can see
it, and raises an error on changes once the model may have been compiled or captured with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import NAMESPACE, declared, operator_named

_kernels = torch.library.Library(NAMESPACE, "IMPL")
_python_kernels: dict[tuple[str, str], str] = {}
_frozen: tuple[Resolution, ...] | None = None
_frozen_key = ""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Records the implementation of one operator, as a line of `vllm-backplane ops`."""

    operator: str
    family: str
    implementation: str
    """'kernel' or 'reference'."""
    provider: str
    """The library or module of the implementation."""
    reason: str


def kernel(name: str, dispatch_key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as a device's implementation of an operator.

    A C++ library registers its kernels itself (TORCH_LIBRARY_IMPL) and does not need this.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = operator_named(name)
        if _frozen is not None:
            raise OperatorError(
                f"a kernel for {name!r} was registered after start-up; register it in Device.load_kernels()"
            )
        if (name, dispatch_key) in _python_kernels:
            raise OperatorError(f"{name!r} already has a kernel for {dispatch_key}; remove one")
        _kernels.impl(operator.name, function, dispatch_key)
        _python_kernels[name, dispatch_key] = f"{function.__module__}.{function.__qualname__}"
        return function

    return register


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Returns whether an operator has a kernel for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator_named(name).qualified_name, dispatch_key)


def resolve(dispatch_key: str, provider: str, force_reference: Iterable[str] = ()) -> tuple[Resolution, ...]:
    """Returns the implementation of every operator.

    `force_reference` lists operators, or 'all', that must run as references, to find out whether a kernel computes
    wrong results.
    """
    forced = _named(force_reference)
    table = []
    for name, operator in sorted(declared().items()):
        if name in forced:
            if has_kernel(name, dispatch_key):
                _override_with_reference(name, dispatch_key)
            entry = ("reference", operator.reference.__module__, _FORCED)
        elif has_kernel(name, dispatch_key):
            origin = _python_kernels.get((name, dispatch_key), provider)
            entry = ("kernel", origin, f"registered for dispatch key {dispatch_key}")
        else:
            entry = ("reference", operator.reference.__module__, f"no kernel for dispatch key {dispatch_key}")
        table.append(Resolution(name, operator.family, *entry))
    return tuple(table)


_FORCED = "forced by option reference_ops"


def _named(operators: Iterable[str]) -> set[str]:
    names = set(operators)
    return set(declared()) if "all" in names else {operator_named(name).name for name in names}


def _override_with_reference(name: str, dispatch_key: str) -> None:
    with warnings.catch_warnings():
        # PyTorch warns that a kernel is replaced, which the user requested.
        warnings.simplefilter("ignore", UserWarning)
        _kernels.impl(name, operator_named(name).reference, dispatch_key, allow_override=True)


def freeze(table: tuple[Resolution, ...], dispatch_key: str) -> None:
    """Makes every later change of an implementation in this process an error."""
    global _frozen, _frozen_key
    _frozen, _frozen_key = table, dispatch_key


def require_unchanged() -> None:
    """Raises an OperatorError if a C++ library has registered kernels since `freeze`.

    `kernel` cannot detect this, and the model may be compiled with the old implementations.
    """
    for line in _frozen or ():
        forced = line.reason == _FORCED
        if not forced and (line.implementation == "kernel") != has_kernel(line.operator, _frozen_key):
            raise OperatorError(
                f"the implementation of {line.operator!r} changed after start-up; load it in Device.load_kernels()"
            )


def require_same_references(requested: Iterable[str]) -> None:
    """Raises an OperatorError if a later engine of the process requests other references than the first."""
    forced = {line.operator for line in _frozen or () if line.reason == _FORCED}
    if _named(requested) != forced:
        raise OperatorError(
            "an earlier engine of this process forces "
            + (f"the references of {', '.join(sorted(forced))}" if forced else "no references")
            + ", and implementations cannot change afterwards; start this engine in another process, or with the same "
            "reference_ops"
        )


def frozen() -> tuple[Resolution, ...] | None:
    """Returns the frozen table, or None before `freeze`."""
    return _frozen
