"""vLLM's version as a plugin takes it apart: what is left of it after each step, and when a comparison of it holds."""

from __future__ import annotations

import ast

from vllm_patchbay.audit.conditions import Always, Any, Condition, VersionIs
from vllm_patchbay.audit.scopes import Const, Release, Value, Versioned

_OLDEST_PYTHON = (3, 10)
_OF_A_VERSION = {
    "release": Release("tuple"),
    "base_version": Release("text"),
    "public": Release("text"),
    "major": Release("number", 0),
    "minor": Release("number", 1),
    "micro": Release("number", 2),
}
_NUMBERS = ("tuple", "fields")
_CUTS = ("split", "rsplit", "partition")
METHODS = (*_CUTS, "strip", "lstrip", "rstrip")


def attribute(release: Release, name: str) -> Value:
    return _OF_A_VERSION.get(name, Versioned()) if release.form == "version" else Versioned()


def element(release: Release, key: Value | None, stop: Value | None) -> Value:
    """``release[key]``, or ``release[:stop]`` where there is no key."""
    if key is None:
        if release.form in _NUMBERS and isinstance(stop, Const) and isinstance(stop.value, int):
            return Release(release.form, stop.value)
        return Versioned()
    if release.form == "parts":
        return Release("text")
    if release.form in _NUMBERS and isinstance(key, Const) and isinstance(key.value, int):
        return unpacked(release, key.value)
    return Versioned()


def unpacked(release: Release, index: int) -> Value:
    """One of the numbers, or of the strings before they are numbers."""
    if release.form not in _NUMBERS or index < 0:
        return Versioned()
    return Release("number" if release.form == "tuple" else "field", index)


def converted(function: str, release: Release) -> Value:
    """``int(x)``, ``tuple(x)`` and their like; ``int`` of a list stands for that of its elements."""
    if function == "int":
        forms = {"field": "number", "number": "number", "fields": "tuple"}
        return Release(forms[release.form], release.length) if release.form in forms else Versioned()
    if function in ("tuple", "list") and release.form in _NUMBERS:
        return release
    if function == "str" and release.form in ("text", "version"):
        return Release("text")
    return Versioned()


def method(release: Release, name: str, argument: str | None) -> Value:
    """What one of `METHODS` of the version as text returns."""
    if name in _CUTS:
        return Release("fields" if name == "split" and argument == "." and release.form == "text" else "parts")
    return Release("text")


def collected(elements: list[Value]) -> Release | None:
    """``(v.major, v.minor)`` is the beginning of the tuple."""
    if not elements:
        return None
    numbers = [Release("number", index) for index in range(len(elements))]
    return Release("tuple", len(elements)) if elements == numbers else None


def comparison(release: Release, operator: str, literal: object) -> Condition | None:
    if release.form == "number" and isinstance(literal, int) and release.length is not None:
        return VersionIs("number", operator, literal, release.length)
    if release.form == "tuple" and isinstance(literal, tuple):
        return VersionIs("tuple", operator, literal, release.length)
    if release.form in ("version", "text") and isinstance(literal, str):
        return VersionIs(release.form, operator, literal)
    return None


def in_range(release: Value, specifiers: str) -> Condition | None:
    is_version = isinstance(release, Release) and release.form in ("version", "text")
    return VersionIs("range", "==", specifiers) if is_version else None


def matched(release: Release, pattern: ast.pattern) -> Condition | None:
    """When a version matches a pattern of a match statement; None where that is not understood."""
    if isinstance(pattern, ast.MatchValue) and isinstance(pattern.value, ast.Constant):
        return comparison(release, "==", pattern.value.value)
    if isinstance(pattern, ast.MatchOr):
        parts = [matched(release, part) for part in pattern.patterns]
        known = tuple(part for part in parts if part is not None)
        return Any(known) if len(known) == len(parts) else None
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return Always(True)
    return None


def of_python(operator: str, literal: object) -> Condition | None:
    """What is so with every Python that vLLM runs on."""
    if not isinstance(literal, tuple) or literal > _OLDEST_PYTHON:
        return None
    if operator == ">=":
        return Always(True)
    return Always(False) if operator == "<" else None
