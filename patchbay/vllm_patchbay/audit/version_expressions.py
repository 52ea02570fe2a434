"""Evaluates how a plugin takes vLLM's version apart, and turns comparisons of the parts into conditions.

Each function takes the version in one form (`VllmVersion.form`) and returns the form that an operation yields, or
`VersionDerived` if the auditor does not evaluate that operation.
"""

from __future__ import annotations

import ast

from vllm_patchbay.audit.conditions import Always, Any, Condition, VersionIs
from vllm_patchbay.audit.scopes import Const, Value, VersionDerived, VllmVersion

_OLDEST_PYTHON = (3, 10)
"""The oldest Python that vLLM supports."""
_VERSION_ATTRIBUTES = {
    "release": VllmVersion("tuple"),
    "base_version": VllmVersion("text"),
    "public": VllmVersion("text"),
    "major": VllmVersion("number", 0),
    "minor": VllmVersion("number", 1),
    "micro": VllmVersion("number", 2),
}
_SEQUENCE_FORMS = ("tuple", "fields")
_SPLITTING_METHODS = ("split", "rsplit", "partition")
METHODS = (*_SPLITTING_METHODS, "strip", "lstrip", "rstrip")
"""Methods of str that `method_result` evaluates."""


def attribute(version: VllmVersion, name: str) -> Value:
    """Evaluates ``version.name``."""
    return _VERSION_ATTRIBUTES.get(name, VersionDerived()) if version.form == "version" else VersionDerived()


def element(version: VllmVersion, key: Value | None, stop: Value | None) -> Value:
    """Evaluates ``version[key]``, or ``version[:stop]`` if the key is None."""
    if key is None:
        if version.form in _SEQUENCE_FORMS and isinstance(stop, Const) and isinstance(stop.value, int):
            return VllmVersion(version.form, stop.value)
        return VersionDerived()
    if version.form == "parts":
        return VllmVersion("text")
    if version.form in _SEQUENCE_FORMS and isinstance(key, Const) and isinstance(key.value, int):
        return item(version, key.value)
    return VersionDerived()


def item(version: VllmVersion, index: int) -> Value:
    """Returns the item at an index of a version that is a sequence of numbers or of strings."""
    if version.form not in _SEQUENCE_FORMS or index < 0:
        return VersionDerived()
    return VllmVersion("number" if version.form == "tuple" else "field", index)


def conversion(function: str, version: VllmVersion) -> Value:
    """Evaluates ``function(version)`` for int, str, tuple and list; int of a sequence converts each element."""
    if function == "int":
        forms = {"field": "number", "number": "number", "fields": "tuple"}
        return VllmVersion(forms[version.form], version.length) if version.form in forms else VersionDerived()
    if function in ("tuple", "list") and version.form in _SEQUENCE_FORMS:
        return version
    if function == "str" and version.form in ("text", "version"):
        return VllmVersion("text")
    return VersionDerived()


def method_result(version: VllmVersion, name: str, argument: str | None) -> Value:
    """Evaluates one of `METHODS`, called on the version as text."""
    if name in _SPLITTING_METHODS:
        return VllmVersion("fields" if name == "split" and argument == "." and version.form == "text" else "parts")
    return VllmVersion("text")


def tuple_of(elements: list[Value]) -> VllmVersion | None:
    """Returns ``(v.major, v.minor)`` and the like as the first numbers of the version; None for other elements."""
    if not elements:
        return None
    numbers = [VllmVersion("number", index) for index in range(len(elements))]
    return VllmVersion("tuple", len(elements)) if elements == numbers else None


def comparison(version: VllmVersion, operator: str, literal: object) -> Condition | None:
    """Returns the condition ``version operator literal``; None if the auditor cannot evaluate it."""
    if version.form == "number" and isinstance(literal, int) and version.length is not None:
        return VersionIs("number", operator, literal, version.length)
    if version.form == "tuple" and isinstance(literal, tuple):
        return VersionIs("tuple", operator, literal, version.length)
    if version.form in ("version", "text") and isinstance(literal, str):
        return VersionIs(version.form, operator, literal)
    return None


def in_range(version: Value, specifiers: str) -> Condition | None:
    """Returns the condition that a version satisfies the specifiers; None if the value is not a whole version."""
    is_version = isinstance(version, VllmVersion) and version.form in ("version", "text")
    return VersionIs("range", "==", specifiers) if is_version else None


def pattern_condition(version: VllmVersion, pattern: ast.pattern) -> Condition | None:
    """Returns the condition that a version matches a case pattern; None if the auditor cannot evaluate the pattern."""
    if isinstance(pattern, ast.MatchValue) and isinstance(pattern.value, ast.Constant):
        return comparison(version, "==", pattern.value.value)
    if isinstance(pattern, ast.MatchOr):
        parts = [pattern_condition(version, part) for part in pattern.patterns]
        known = tuple(part for part in parts if part is not None)
        return Any(known) if len(known) == len(parts) else None
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return Always(True)
    return None


def python_comparison(operator: str, literal: object) -> Condition | None:
    """Returns the condition ``sys.version_info operator literal`` if it is the same for every Python that vLLM
    supports, else None."""
    if not isinstance(literal, tuple) or literal > _OLDEST_PYTHON:
        return None
    if operator == ">=":
        return Always(True)
    return Always(False) if operator == "<" else None
