"""Compares our calls of vLLM's functions with their signatures in a vLLM's source: imported names, super() and self.

Only literal arguments are compared: the number of positional ones and the names of keyword arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_patchbay.upstream import Resolution, Signature, SymbolIndex
from vllm_patchbay.upstream.modules import Binds, MethodKind, dotted


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """Describes a call of a function of vLLM."""

    where: str
    function: str
    fault: str
    """Why the call is wrong; empty if it is right."""


def calls(package: Path, index: SymbolIndex) -> Iterator[CheckedCall]:
    """Yields every call of vLLM in `package`. `index` must contain the package and vLLM."""
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text())
        name = file.relative_to(package).as_posix()
        module = ".".join([package.name, *name.removesuffix(".py").removesuffix("/__init__").split("/")])
        imported = dict(_imported(tree))
        for owner, node in _calls(tree):
            upstream = _function(index, module, owner, node, imported)
            if upstream is None or upstream.module.partition(".")[0] != "vllm":
                continue
            signature = _as_called(index, upstream, node)
            if signature is not None:
                yield CheckedCall(f"{name}:{node.lineno}", upstream.path, mismatch(signature, node))


def mismatch(signature: Signature, node: ast.Call) -> str:
    """Returns why Python would reject the call, or an empty string."""
    given = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    open_ended = len(given) < len(node.keywords) or any(isinstance(each, ast.Starred) for each in node.args)
    places = signature.positional
    if len(node.args) > len(places) and not signature.takes_any_positional and not open_ended:
        return f"{len(node.args)} arguments by position for {signature}"
    known = {parameter.name for parameter in (*places, *signature.keyword_only)}
    for name in sorted(given - known):
        if not signature.takes_any_keyword:
            return f"no argument {name} in {signature}"
    if not open_ended:
        for parameter in (*places[len(node.args) :], *signature.keyword_only):
            if not parameter.has_default and parameter.name not in given:
                return f"no value for {parameter.name} in {signature}"
    return ""


def _imported(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
            for alias in node.names:
                yield alias.asname or alias.name, (node.module, alias.name)


def _calls(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yields every call with the name of the class that contains it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield owner, node
        yield from _calls(node, node.name if isinstance(node, ast.ClassDef) else owner)


def _function(
    index: SymbolIndex, module: str, owner: str, node: ast.Call, imported: dict[str, tuple[str, str]]
) -> Resolution | None:
    function = node.func
    path = dotted(function)
    first, _, rest = path.partition(".")
    if first in imported:
        return index.resolve_path(".".join([*imported[first], *([rest] if rest else [])]))
    if not owner or not isinstance(function, ast.Attribute):
        return None
    if isinstance(function.value, ast.Call) and dotted(function.value.func) == "super" and not function.value.args:
        ancestry = index.ancestors(module, owner)
        for where, name, body in ancestry.classes[1:] if ancestry is not None else ():
            if function.attr in body.members:
                return index.resolve(where, f"{name}.{function.attr}")
        return None
    if path == f"self.{function.attr}":
        return index.resolve(module, f"{owner}.{function.attr}")
    return None


def _as_called(index: SymbolIndex, upstream: Resolution, node: ast.Call) -> Signature | None:
    """Returns the signature without the argument that Python passes itself, or None if it is unknown."""
    if upstream.is_class:
        constructor = index.member(upstream, "__init__")
        symbol = constructor.symbol
        return symbol.signature.without_first() if symbol is not None and symbol.signature is not None else None
    symbol = upstream.symbol
    if symbol is None or symbol.binds is not Binds.FUNCTION or symbol.signature is None:
        return None
    is_member = "." in upstream.qualname
    return (
        symbol.signature.without_first()
        if is_member and symbol.method_kind is not MethodKind.STATIC
        else symbol.signature
    )
