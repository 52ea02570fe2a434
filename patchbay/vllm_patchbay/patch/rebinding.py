"""Replaces a live object in every module that holds it, and restores it.

It never creates an attribute. A name that moved upstream is an error, where a plain assignment would create a second
attribute that no code reads.
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
    """Records the attributes that were replaced for one patch."""

    patch: Patch
    places: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    """Owner, attribute, object before and object after."""

    def put(self, owner: Any, attribute: str, before: Any, after: Any) -> None:
        """Replaces an attribute and records it."""
        setattr(owner, attribute, after)
        self.places.append((owner, attribute, before, after))

    def undo(self) -> None:
        """Restores all attributes. Raises PatchError, and restores none, if one was changed after the patch."""
        for owner, attribute, _, after in reversed(self.places):
            if vars(owner).get(attribute) is not after:
                raise PatchError(
                    f"{self.patch.name} cannot be undone: {_name(owner)}.{attribute} was changed after the patch; "
                    "undo that change first"
                )
        if not self.places:
            return
        owner, attribute, before, after = self.places[0]
        for module, name in holders(owner, attribute, after):  # also modules that imported the replacement
            setattr(module, name, before)
        for place, name, before, _ in reversed(self.places):
            setattr(place, name, before)
        self.places.clear()
        self.patch.in_place = False
        # `original` stays set: a reference to the replacement that is kept elsewhere still calls it.


def find_target(patch: Patch) -> tuple[Any, str, Any]:
    """Returns the owner, the attribute's name and the raw object of a patch's target in this process. Raises PatchError
    if it does not exist."""
    try:
        owner: Any = importlib.import_module(patch.target_module)
    except ImportError as fault:
        raise PatchError(f"{patch.name}: the module of {patch.target} cannot be imported: {fault}") from fault
    *path, attribute = patch.target_name.split(".")
    for part in path:
        owner = _own_attribute(patch, owner, part)
    return owner, attribute, _own_attribute(patch, owner, attribute)


def _own_attribute(patch: Patch, owner: Any, attribute: str) -> Any:
    """Returns an attribute that the owner itself has. Raises PatchError if it is inherited or missing."""
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


def rebind(patch: Patch, incompatibility: Callable[[type], str] = lambda replacement: "") -> Rebinding:
    """Applies a patch to this process. Raises PatchError before anything is changed. `incompatibility` returns why a
    class cannot take the target's place, or an empty string."""
    owner, attribute, raw = find_target(patch)
    original = _callable_original(raw)
    if patch.in_place or (original is patch.replacement and callable(original)):
        raise PatchError(
            f"{patch.name} is already applied and would call itself; undo it in the session that applied it"
        )
    replacement = _as_descriptor(patch, raw)
    if isinstance(replacement, cached_property):
        replacement.__set_name__(owner, attribute)  # Python calls it only for names that a class body binds
    fault = incompatibility(replacement) if inspect.isclass(raw) and inspect.isclass(replacement) else ""
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
    """Returns the original in the form in which the replacement calls it: with `self` or `cls` as first argument."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    if isinstance(raw, cached_property):
        return raw.func
    return raw.fget if isinstance(raw, property) else raw


def _as_descriptor(patch: Patch, raw: Any) -> Any:
    """Returns the replacement as the same kind of descriptor as the original. Raises PatchError if it cannot be."""
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
            f"{patch.name} replaces a class by a {type(new).__name__}; give a subclass of it, or a function that takes "
            "the class and returns a subclass"
        )
    if inspect.isclass(raw) and not issubclass(new, raw):
        raise PatchError(f"{patch.name}: its class must inherit from {patch.target}, so that isinstance still works")
    if callable(raw) and not callable(new):
        raise PatchError(f"{patch.name} replaces a callable by a {type(new).__name__}; give a function")
    return new
