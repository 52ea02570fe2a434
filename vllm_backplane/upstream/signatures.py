"""Signatures read from source, and whether one function can stand where callers expect another.

Compared is what a caller can do: how many arguments by position, which by name, which may be left out. Annotations and
the values of defaults do not count.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    POSITIONAL_ONLY = "positional-only"
    NORMAL = "normal"
    VAR_POSITIONAL = "*"
    KEYWORD_ONLY = "keyword-only"
    VAR_KEYWORD = "**"


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: Kind
    has_default: bool = False

    def __str__(self) -> str:
        stars = self.kind.value if self.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD) else ""
        return f"{stars}{self.name}{'=…' if self.has_default else ''}"


@dataclass(frozen=True, slots=True)
class Signature:
    parameters: tuple[Parameter, ...]
    is_async: bool = False

    @property
    def positional(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.kind in (Kind.POSITIONAL_ONLY, Kind.NORMAL))

    @property
    def keyword_only(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.kind is Kind.KEYWORD_ONLY)

    @property
    def takes_any_positional(self) -> bool:
        return any(p.kind is Kind.VAR_POSITIONAL for p in self.parameters)

    @property
    def takes_any_keyword(self) -> bool:
        return any(p.kind is Kind.VAR_KEYWORD for p in self.parameters)

    def without_first(self) -> Signature:
        """As seen by the caller of a bound method."""
        if self.parameters and self.parameters[0].kind in (Kind.POSITIONAL_ONLY, Kind.NORMAL):
            return replace(self, parameters=self.parameters[1:])
        return self

    def __str__(self) -> str:
        words: list[str] = []
        starred = False
        for index, parameter in enumerate(self.parameters):
            if parameter.kind is Kind.KEYWORD_ONLY and not starred:
                words.append("*")
                starred = True
            starred = starred or parameter.kind is Kind.VAR_POSITIONAL
            words.append(str(parameter))
            following = self.parameters[index + 1].kind if index + 1 < len(self.parameters) else None
            if parameter.kind is Kind.POSITIONAL_ONLY and following is not Kind.POSITIONAL_ONLY:
                words.append("/")
        return f"{'async ' if self.is_async else ''}({', '.join(words)})"


def signature_of_node(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Signature:
    arguments = node.args
    positional = [(a.arg, Kind.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    positional += [(a.arg, Kind.NORMAL) for a in arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [Parameter(name, kind, index >= first_default) for index, (name, kind) in enumerate(positional)]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, Kind.VAR_POSITIONAL))
    found += [
        Parameter(a.arg, Kind.KEYWORD_ONLY, default is not None)
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, Kind.VAR_KEYWORD))
    return Signature(tuple(found), isinstance(node, ast.AsyncFunctionDef))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One way in which a call that suits `original` fails with `replacement`."""

    certain: bool
    """Whether every call fails, and not only one that uses an optional argument or a name."""

    what: str


def mismatches(original: Signature, replacement: Signature) -> tuple[Mismatch, ...]:
    """What callers of `original` cannot do with `replacement`; empty if it can stand in its place.

    Both as the caller sees them: `without_first()` for methods.
    """
    found: list[Mismatch] = []
    if original.is_async != replacement.is_async:
        was, now = ("async", "not") if original.is_async else ("not async", "async")
        found.append(Mismatch(True, f"upstream is {was} and the override is {now}"))
    if original.takes_any_positional and original.takes_any_keyword:
        # It promises nothing: a placeholder for overrides of any shape.
        return tuple(found)
    found += _not_accepted(original, replacement)
    found += _demanded(original, replacement)
    return tuple(found)


def _not_accepted(original: Signature, replacement: Signature) -> list[Mismatch]:
    found = []
    accepted = {p.name: p for p in replacement.parameters if p.kind in (Kind.NORMAL, Kind.KEYWORD_ONLY)}
    places = replacement.positional
    for index, parameter in enumerate(original.positional):
        by_name = parameter.name in accepted or replacement.takes_any_keyword
        by_place = index < len(places) or replacement.takes_any_positional
        if parameter.kind is Kind.POSITIONAL_ONLY:
            by_name = by_place
        if not by_place and not by_name:
            found.append(Mismatch(not parameter.has_default, f"{parameter.name!r} is not accepted"))
        elif not by_place:
            found.append(Mismatch(False, f"{parameter.name!r} is not accepted by position"))
        elif not by_name:
            in_place = places[index].name if index < len(places) else "*"
            found.append(Mismatch(False, f"{parameter.name!r} is not accepted by name ({in_place!r} is in its place)"))
        elif index < len(places) and places[index].name != parameter.name and parameter.name in accepted:
            found.append(Mismatch(False, f"{parameter.name!r} is at another position"))
    found += [
        Mismatch(not parameter.has_default, f"{parameter.name!r} is not accepted")
        for parameter in original.keyword_only
        if parameter.name not in accepted and not replacement.takes_any_keyword
    ]
    if original.takes_any_positional and not replacement.takes_any_positional:
        found.append(Mismatch(False, "further positional arguments are not accepted"))
    if original.takes_any_keyword and not replacement.takes_any_keyword:
        found.append(Mismatch(False, "further keyword arguments are not accepted"))
    return found


def _demanded(original: Signature, replacement: Signature) -> list[Mismatch]:
    given = {p.name for p in original.parameters if p.kind in (Kind.NORMAL, Kind.KEYWORD_ONLY)}
    optional = {p.name for p in original.parameters if p.has_default}
    places = original.positional
    found = []
    for index, parameter in enumerate(replacement.positional):
        if parameter.has_default:
            continue
        if index < len(places):
            if places[index].has_default:
                found.append(Mismatch(False, f"{parameter.name!r} is required and upstream's is optional"))
        elif parameter.name not in given and not original.takes_any_positional:
            found.append(Mismatch(True, f"{parameter.name!r} is required and unknown upstream"))
        elif parameter.name in optional:
            found.append(Mismatch(False, f"{parameter.name!r} is required and upstream's is optional"))
    for parameter in replacement.keyword_only:
        if parameter.has_default:
            continue
        if parameter.name not in given:
            found.append(Mismatch(True, f"{parameter.name!r} is required and unknown upstream"))
        elif parameter.name in optional:
            found.append(Mismatch(False, f"{parameter.name!r} is required and upstream's is optional"))
    return found
