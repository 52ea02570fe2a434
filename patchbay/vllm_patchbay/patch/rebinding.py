"""Putting a replacement in the place of a live object, everywhere it is held, and back.

Never an attribute that was not there: a name that moved upstream is an error here, where a plain assignment would
create a second, unused one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

from vllm_patchbay.errors import PatchError, nearest
from vllm_patchbay.patch.declaration import Patch
from vllm_patchbay.patch.references import holders


@dataclass
class Rebinding:
    """What was changed for one patch, so that it can be undone."""

    patch: Patch
    places: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    """(owner, attribute, what was there, what is there now)"""

    def put(self, owner: Any, attribute: str, before: Any, after: Any) -> None:
        setattr(owner, attribute, after)
        self.places.append((owner, attribute, before, after))

    def undo(self) -> None:
        for owner, attribute, _, after in reversed(self.places):
            if vars(owner).get(attribute) is not after:
                raise PatchError(
                    f"{self.patch.name} cannot be undone: {_name(owner)}.{attribute} was changed again since; undo "
                    "that first"
                )
        if not self.places:
            return
        owner, attribute, before, after = self.places[0]
        for module, name in holders(owner, attribute, after):  # also those that imported it since
            setattr(module, name, before)
        for place, name, before, _ in reversed(self.places):
            setattr(place, name, before)
        self.places.clear()
        self.patch.in_place = False
        # `original` stays: who keeps the replacement elsewhere goes on calling it.


def find(patch: Patch) -> tuple[Any, str, Any]:
    """(owner, attribute, the raw object there) of a patch's target in this process."""
    try:
        owner: Any = importlib.import_module(patch.target_module)
    except ImportError as fault:
        raise PatchError(f"{patch.name}: its target's module cannot be imported: {fault}") from fault
    *path, attribute = patch.target_name.split(".")
    for part in path:
        owner = _own(patch, owner, part)
    return owner, attribute, _own(patch, owner, attribute)


def _own(patch: Patch, owner: Any, attribute: str) -> Any:
    try:
        return vars(owner)[attribute]
    except KeyError:
        pass
    if inspect.isclass(owner):
        for base in owner.__mro__[1:]:
            if attribute in vars(base):
                raise PatchError(
                    f"{patch.name}: {_name(owner)} inherits {attribute!r} from {_name(base)}; patch it there"
                )
    raise PatchError(
        f"{patch.name}: {_name(owner)} has no {attribute!r}{nearest(attribute, vars(owner))} It was renamed, moved or "
        "removed upstream; adapt the patch or remove it"
    )


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}:{owner.__qualname__}"


def rebind(patch: Patch, misfit: Callable[[type], str] = lambda replacement: "") -> Rebinding:
    """Apply a patch to this process. Raises PatchError before anything is changed. `misfit` says why a class cannot
    take the target's place, or nothing."""
    owner, attribute, raw = find(patch)
    original = _callable_original(raw)
    if patch.in_place or (original is patch.replacement and callable(original)):
        raise PatchError(f"{patch.name} is in its place already and would call itself; undo it where it was applied")
    replacement = _in_kind(patch, raw)
    if isinstance(replacement, cached_property):
        replacement.__set_name__(owner, attribute)  # Python does so only for what a class body binds
    fault = misfit(replacement) if inspect.isclass(raw) and inspect.isclass(replacement) else ""
    if fault:
        raise PatchError(f"patch {patch.name}: {fault}")
    rebinding = Rebinding(patch)
    patch.original, patch.in_place = original, True
    others = holders(owner, attribute, raw)
    rebinding.put(owner, attribute, raw, replacement)
    for module, name in others:
        rebinding.put(module, name, raw, replacement)
    return rebinding


def _callable_original(raw: Any) -> Any:
    """What was there, so that the replacement can call it with the arguments it was given, `self` or `cls` included."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    if isinstance(raw, cached_property):
        return raw.func
    return raw.fget if isinstance(raw, property) else raw


def _in_kind(patch: Patch, raw: Any) -> Any:
    """The replacement as the same kind of descriptor as what it replaces."""
    new = patch.replacement
    if inspect.isclass(raw) and inspect.isfunction(new):
        new = new(raw)
    if isinstance(raw, (staticmethod, classmethod)) and not isinstance(new, type(raw)):
        return type(raw)(new)
    if isinstance(raw, property) and not isinstance(new, property):
        return property(new, raw.fset, raw.fdel, raw.__doc__)
    if isinstance(raw, cached_property):
        return cached_property(new.func if isinstance(new, cached_property) else new)
    if inspect.isclass(raw) and not inspect.isclass(new):
        raise PatchError(
            f"{patch.name} puts a {type(new).__name__} in the place of a class; give a subclass of it, or a function "
            "that takes it and returns one"
        )
    if inspect.isclass(raw) and not issubclass(new, raw):
        raise PatchError(f"{patch.name}: its class must inherit from {patch.target}, so that isinstance still holds")
    if callable(raw) and not callable(new):
        raise PatchError(f"{patch.name} puts a {type(new).__name__} in the place of something callable")
    return new
