"""Reads signatures from source, and compares whether one function accepts every call that another accepts.

The comparison is about what a caller can pass: how many arguments by position, which by name, and which can be left
out. It ignores annotations and the values of defaults.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """Names the kind of a parameter, as in `inspect.Parameter.kind`."""

    POSITIONAL_ONLY = "positional-only"
    NORMAL = "normal"
    VAR_POSITIONAL = "*"
    KEYWORD_ONLY = "keyword-only"
    VAR_KEYWORD = "**"


@dataclass(frozen=True, slots=True)
class Parameter:
    """Describes one parameter of a function."""

    name: str
    kind: Kind
    has_default: bool = False

    def __str__(self) -> str:
        stars = self.kind.value if self.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD) else ""
        return f"{stars}{self.name}{'=…' if self.has_default else ''}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Describes the parameters of a function, and whether a call of it has to be awaited."""

    parameters: tuple[Parameter, ...]
    is_async: bool = False
    """Whether a call returns an awaitable. A call of an asynchronous generator function does not."""

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
        """Returns the signature that the caller of a bound method sees: without `self` or `cls`."""
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
    """Returns the signature of a function, its first parameter included."""
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
    return Signature(tuple(found), isinstance(node, ast.AsyncFunctionDef) and not _is_async_generator(node))


def _is_async_generator(node: ast.AsyncFunctionDef) -> bool:
    """Returns whether a call gives an asynchronous iterator: the body has a yield, or a stub's annotation is one."""
    pending: list[ast.AST] = list(node.body)
    while pending:
        inner = pending.pop()
        if isinstance(inner, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            pending += ast.iter_child_nodes(inner)
    returned = ast.unparse(node.returns) if node.returns is not None else ""
    is_stub = all(isinstance(s, (ast.Pass, ast.Expr, ast.Raise)) for s in node.body)
    return is_stub and ("AsyncGenerator" in returned or "AsyncIterator" in returned)


class Fault(StrEnum):
    """Names what a caller of the original does that fails with the replacement."""

    ANY_CALL = "any call"
    OMITS = "leaves the argument out"
    PASSES = "passes an optional argument"
    BY_NAME = "passes the argument by name"
    BY_POSITION = "passes the argument by position"
    ON_CLASS = "calls it on the class"
    PASSES_MORE = "passes further arguments"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Describes one way in which a call that suits `original` fails with `replacement`."""

    fault: Fault
    what: str
    parameter: str = ""
    index: int = -1
    """Place of the parameter among those that can be passed by position."""

    @property
    def is_about_arguments(self) -> bool:
        """Returns whether it concerns the parameters, and not whether the function is asynchronous."""
        return not self.what.startswith("upstream is ")

    @property
    def certain(self) -> bool:
        """Returns whether every call fails, and not only calls of some form."""
        return self.fault is Fault.ANY_CALL


def mismatches(original: Signature, replacement: Signature) -> tuple[Mismatch, ...]:
    """Returns the calls of `original` that fail with `replacement`; empty if it can take the original's place.

    Both signatures are those that the caller sees: `without_first()` for methods.
    """
    found: list[Mismatch] = []
    if original.is_async and not replacement.is_async:
        # A plain function can return an awaitable, so not every call fails.
        found.append(Mismatch(Fault.PASSES_MORE, "upstream is async and the override is not"))
    elif replacement.is_async and not original.is_async:
        found.append(Mismatch(Fault.ANY_CALL, "upstream is not async and the override is"))
    if original.takes_any_positional and original.takes_any_keyword:
        # (*args, **kwargs) is a placeholder: overrides may have any parameters.
        return tuple(found)
    return (*found, *_not_accepted(original, replacement), *_required(original, replacement))


def _not_accepted(original: Signature, replacement: Signature) -> Iterator[Mismatch]:
    """Yields the arguments that the original accepts and the replacement does not."""
    accepted = {p.name: p for p in replacement.parameters if p.kind in (Kind.NORMAL, Kind.KEYWORD_ONLY)}
    places = replacement.positional
    for index, parameter in enumerate(original.positional):
        name = parameter.name
        instead = places[index] if index < len(places) else None
        by_place = instead is not None or replacement.takes_any_positional
        # '**kwargs' accepts the name, but then the parameter at its position gets no argument.
        by_name = name in accepted or (replacement.takes_any_keyword and (instead is None or instead.has_default))
        if parameter.kind is Kind.POSITIONAL_ONLY:
            if not by_place:
                yield _rejected(parameter, index)
        elif not by_place and not by_name:
            yield _rejected(parameter, index)
        elif not by_place:
            yield Mismatch(Fault.BY_POSITION, f"{name!r} is not accepted by position", name, index)
        elif not by_name:
            what = f"{name!r} is not accepted by name ({instead.name if instead else '*'!r} is in its place)"
            yield Mismatch(Fault.BY_NAME, what, name, index)
        elif name in accepted and (instead is None or instead.name != name):
            yield Mismatch(Fault.BY_POSITION, f"{name!r} is at another position", name, index)
    for parameter in original.keyword_only:
        if parameter.name not in accepted and not replacement.takes_any_keyword:
            yield _rejected(parameter, -1)
    if original.takes_any_positional and not replacement.takes_any_positional:
        yield Mismatch(Fault.PASSES_MORE, "further positional arguments are not accepted")
    elif original.takes_any_positional:
        taken = {place.name for place in places[len(original.positional) :]}
        for name in sorted(taken & {parameter.name for parameter in original.keyword_only}):
            yield Mismatch(Fault.PASSES_MORE, f"a further positional argument is taken for {name!r}")
    if original.takes_any_keyword and not replacement.takes_any_keyword:
        yield Mismatch(Fault.PASSES_MORE, "further keyword arguments are not accepted")


def _rejected(parameter: Parameter, index: int) -> Mismatch:
    """Returns the mismatch of a parameter that the replacement accepts neither by position nor by name."""
    fault = Fault.PASSES if parameter.has_default else Fault.ANY_CALL
    return Mismatch(fault, f"{parameter.name!r} is not accepted", parameter.name, index)


def _required(original: Signature, replacement: Signature) -> Iterator[Mismatch]:
    """Yields the arguments that the replacement requires and callers of the original need not pass."""
    given = {p.name: p for p in original.parameters if p.kind in (Kind.NORMAL, Kind.KEYWORD_ONLY)}
    places = original.positional
    for index, parameter in enumerate([*replacement.positional, *replacement.keyword_only]):
        if parameter.has_default:
            continue
        name = parameter.name
        is_place = parameter.kind is not Kind.KEYWORD_ONLY
        theirs = places[index] if is_place and index < len(places) else given.get(name)
        if theirs is not None and not theirs.has_default:
            continue
        by_name = parameter.kind is not Kind.POSITIONAL_ONLY and original.takes_any_keyword
        if theirs is None and not (is_place and original.takes_any_positional) and not by_name:
            yield Mismatch(Fault.ANY_CALL, f"{name!r} is required and unknown upstream", name)
        else:
            yield Mismatch(Fault.OMITS, f"{name!r} is required and upstream's is optional", name)
