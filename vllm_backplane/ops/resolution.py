"""What each operator runs on for a device, settled once and then frozen.

PyTorch's dispatcher decides at the call; this table only reads what it will decide, so that the decision
can be shown, and refuses changes once the model may have been compiled or captured around it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import NAMESPACE, declared, get

_kernels = torch.library.Library(NAMESPACE, "IMPL")
_python_kernels: dict[tuple[str, str], str] = {}
_frozen: tuple[Resolution, ...] | None = None
_frozen_key = ""


@dataclass(frozen=True, slots=True)
class Resolution:
    """One line of `vllm-backplane ops`."""

    operator: str
    family: str
    implementation: str
    """'kernel' or 'reference'."""
    provider: str
    reason: str


def kernel(name: str, dispatch_key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a device's implementation of an operator.

    A device that brings a C++ library registers there (TORCH_LIBRARY_IMPL) and needs no call of this.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = get(name)
        if _frozen is not None:
            raise OperatorError(f"a kernel for {name!r} comes after start-up; register it in Device.load_kernels()")
        if (name, dispatch_key) in _python_kernels:
            raise OperatorError(f"{name!r} already has a kernel for {dispatch_key}")
        _kernels.impl(operator.name, function, dispatch_key)
        _python_kernels[name, dispatch_key] = f"{function.__module__}.{function.__qualname__}"
        return function

    return register


def has_kernel(name: str, dispatch_key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(get(name).qualified_name, dispatch_key)


def resolve(dispatch_key: str, provider: str, force_reference: Iterable[str] = ()) -> tuple[Resolution, ...]:
    """Settle every operator. `force_reference` names operators ('all' for each) that must run as references,
    to find out whether a kernel is at fault."""
    forced = _named(force_reference)
    table = []
    for name, operator in sorted(declared().items()):
        if name in forced:
            if has_kernel(name, dispatch_key):
                _override_with_reference(name, dispatch_key)
            entry = ("reference", operator.reference.__module__, _ASKED_FOR)
        elif has_kernel(name, dispatch_key):
            origin = _python_kernels.get((name, dispatch_key), provider)
            entry = ("kernel", origin, f"registered for dispatch key {dispatch_key}")
        else:
            entry = ("reference", operator.reference.__module__, f"no kernel for dispatch key {dispatch_key}")
        table.append(Resolution(name, operator.family, *entry))
    return tuple(table)


_ASKED_FOR = "asked for by option reference_ops"


def _named(operators: Iterable[str]) -> set[str]:
    names = set(operators)
    return set(declared()) if "all" in names else {get(name).name for name in names}


def _override_with_reference(name: str, dispatch_key: str) -> None:
    with warnings.catch_warnings():
        # PyTorch warns that a kernel is replaced; here that is what the user asked for.
        warnings.simplefilter("ignore", UserWarning)
        _kernels.impl(name, get(name).reference, dispatch_key, allow_override=True)


def freeze(table: tuple[Resolution, ...], dispatch_key: str) -> None:
    """From here on implementations may not change in this process."""
    global _frozen, _frozen_key
    _frozen, _frozen_key = table, dispatch_key


def insist_unchanged() -> None:
    """A library that registered kernels after freezing went past `kernel`; the model may be compiled around the old."""
    for line in _frozen or ():
        forced = line.reason == _ASKED_FOR
        if not forced and (line.implementation == "kernel") != has_kernel(line.operator, _frozen_key):
            raise OperatorError(
                f"the implementation of {line.operator!r} changed after start-up; load it in Device.load_kernels()"
            )


def insist_on_references(asked: Iterable[str]) -> None:
    """A later engine of the process cannot have other implementations than the first."""
    there = {line.operator for line in _frozen or () if line.reason == _ASKED_FOR}
    if _named(asked) != there:
        raise OperatorError(
            "an earlier engine of this process runs "
            + (f"the references of {', '.join(sorted(there))}" if there else "no operator as its reference by option")
            + ", and implementations cannot change afterwards; start this engine in another process, or with the same "
            "reference_ops"
        )


def frozen() -> tuple[Resolution, ...] | None:
    return _frozen
