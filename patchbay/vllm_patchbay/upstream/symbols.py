"""Resolves names in source trees, through re-exports, base classes, star imports and lazy modules.

The outcome is found, missing or unknown. Unknown is for what the source does not show: the names of compiled modules,
names that a module creates on demand, attributes that a base class outside the trees may have. An unknown name is never
reported as missing.
"""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Protocol

from vllm_patchbay.upstream.modules import Binds, ClassBody, ModuleSymbols, Symbol, read_module
from vllm_patchbay.upstream.normalized import fingerprint, normalized_source
from vllm_patchbay.upstream.signatures import Signature
from vllm_patchbay.upstream.source import SourceError, SourceTree
from vllm_patchbay.upstream.star_imports import NO_STAR_IMPORTS, StarImports, resolve_star_imports


class Outcome(StrEnum):
    """Names whether a name was found in the source."""

    FOUND = "found"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Resolution:
    """Holds the definition that a name leads to, or the reason why there is none."""

    outcome: Outcome
    module: str = ""
    """Module of the definition, after following re-exports."""
    qualname: str = ""
    """Qualified name within that module; empty if the name is that of the module."""
    symbol: Symbol | None = None
    reason: str = ""
    """Why it is missing or unknown."""

    @property
    def is_found(self) -> bool:
        return self.outcome is Outcome.FOUND

    @property
    def is_missing(self) -> bool:
        return self.outcome is Outcome.MISSING

    @property
    def is_class(self) -> bool:
        return self.is_found and self.symbol is not None and self.symbol.body is not None

    @property
    def is_module(self) -> bool:
        return self.is_found and bool(self.module) and not self.qualname

    @property
    def path(self) -> str:
        """Returns ``module:qualname``."""
        return f"{self.module}:{self.qualname}" if self.qualname else self.module


@dataclass(frozen=True, slots=True)
class Ancestors:
    """Lists a class and its bases, in the order in which Python looks attributes up (the MRO)."""

    classes: tuple[tuple[str, str, ClassBody], ...]
    """Module, qualified name and content of each class."""
    unknown_bases: tuple[str, ...]
    """Dotted names of bases whose attributes are not known."""
    builtin_attributes: frozenset[str]
    """Attributes of bases from Python's standard library."""
    metaclass: Ancestors | None = None


_MODULE_NAMES = frozenset(dir(ModuleType)) | {name for name in dir(importlib) if name.startswith("__")}
_CLASS_NAMES = frozenset(dir(type)) | frozenset(dir(object))
_STANDARD_MODULES = frozenset(
    {"abc", "argparse", "builtins", "collections", "collections.abc", "enum", "logging", "threading"}
)
_TYPING = frozenset({"typing", "typing_extensions"})
_TYPING_BASES = frozenset({"Generic", "Protocol"})
_MAX_DEPTH = 60


class SymbolIndex:
    """Resolves names in one or more source trees. A module is parsed when it is first needed."""

    def __init__(self, *trees: SourceTree) -> None:
        self.trees = {tree.package: tree for tree in trees}
        self._ancestors: dict[tuple[str, str], Ancestors] = {}
        self._star_imports: dict[str, StarImports] = {}

    def tree_of(self, module: str) -> SourceTree | None:
        """Returns the tree that a module belongs to, or None if it is outside the trees."""
        return self.trees.get(module.partition(".")[0])

    def module(self, name: str) -> ModuleSymbols | None:
        """Returns what a module binds, or None if it does not exist or cannot be read."""
        found = self._read(name)
        return found if isinstance(found, ModuleSymbols) else None

    def resolve(self, module: str, qualname: str = "") -> Resolution:
        """Returns the definition that ``module:qualname`` leads to at run time."""
        return self._resolve(module, qualname.split(".") if qualname else [], 0)

    def resolve_path(self, path: str) -> Resolution:
        """Returns the definition that ``a.b.C.d`` or ``a.b:C.d`` leads to. The longest prefix that is a module is taken
        as the module, unless a package on the way binds the name to something else."""
        if ":" in path:
            module, _, qualname = path.partition(":")
            return self.resolve(module, qualname)
        first, *rest = path.split(".")
        return self._resolve(first, rest, 0)

    def member(self, owner: Resolution, name: str) -> Resolution:
        """Returns an attribute of a module or class that is already resolved."""
        return self._member(owner, name, 0)

    def ancestors(self, module: str, qualname: str) -> Ancestors | None:
        """Returns a class with its bases, or None if ``module:qualname`` is not a class."""
        found = self.resolve(module, qualname)
        return self._ancestors_of(found, 0) if found.is_class else None

    def signature_of(self, module: str, qualname: str) -> Signature | None:
        """Returns the signature of a function or method, its first parameter included; None if it is neither."""
        symbol = self.resolve(module, qualname).symbol
        return symbol.signature if symbol is not None else None

    def kinds_of(self, found: Resolution) -> frozenset[Binds]:
        """Returns how a name is bound, in all branches that can run; empty for a name that the source does not bind."""
        return (
            frozenset(symbol.binds for symbol in self._definitions(found)) if found.symbol is not None else frozenset()
        )

    def is_imported(self, module: str, name: str) -> bool:
        """Returns whether imports, and no other statements, bind the name in the module."""
        content = self.module(module)
        symbols = [s for s in content.names.get(name, ()) if not s.for_type_checkers] if content is not None else []
        return bool(symbols) and all(symbol.binds is Binds.IMPORT for symbol in symbols)

    def source_of(self, module: str, qualname: str) -> str:
        """Returns the text of a definition, with its decorators and its indentation. Definitions in several branches
        follow one another. Raises SourceError if the name is not found or is not a definition."""
        found = self.resolve(module, qualname)
        path = f"{module}:{qualname}"
        if not found.is_found:
            raise SourceError(f"{path} is {found.outcome}: {found.reason}")
        if found.symbol is None:
            raise SourceError(f"{path} is not a definition in the source of {self._tree_name(module)}")
        tree = self.tree_of(found.module)
        text = tree.read(found.module) if tree is not None else None
        assert text is not None
        lines = text.splitlines(keepends=True)
        parts = ["".join(lines[s.line - 1 : s.end_line]) for s in self._definitions(found)]
        return "".join(part if part.endswith("\n") else part + "\n" for part in parts)

    def normalized_source_of(self, module: str, qualname: str) -> str:
        """Returns the text of a definition without comments and docstrings. Raises SourceError as `source_of`."""
        return normalized_source(self.source_of(module, qualname))

    def fingerprint_of(self, module: str, qualname: str) -> str:
        """Returns the fingerprint of a definition. Raises SourceError as `source_of`."""
        return fingerprint(self.source_of(module, qualname))

    # --- modules

    def _tree_name(self, module: str) -> str:
        tree = self.tree_of(module)
        return tree.name if tree is not None else module

    def _read(self, name: str) -> ModuleSymbols | str:
        """Returns what a module binds, or the reason why it cannot be read."""
        tree = self.tree_of(name)
        if tree is None:
            return f"{name} is outside the source trees"
        modules: dict[str, ModuleSymbols | str] = tree.derived.setdefault("modules", {})
        known = modules.get(name)
        if known is None:
            known = modules[name] = _parse(tree, name)
        return known

    def _exists(self, module: str) -> bool:
        tree = self.tree_of(module)
        return tree is not None and tree.has(module)

    # --- names

    def _resolve(self, module: str, parts: list[str], depth: int) -> Resolution:
        tree = self.tree_of(module)
        if tree is None:
            return Resolution(Outcome.UNKNOWN, reason=f"{module} is outside the source trees")
        if not tree.has(module):
            return Resolution(Outcome.MISSING, module, reason=f"there is no module {module}")
        found = Resolution(Outcome.FOUND, module)
        for part in parts:
            found = self._member(found, part, depth + 1)
            if not found.is_found:
                break
        return found

    def _member(self, owner: Resolution, name: str, depth: int) -> Resolution:
        if depth > _MAX_DEPTH:
            return Resolution(Outcome.UNKNOWN, reason=f"imports are circular at {owner.path}")
        if not owner.is_found:
            return owner
        if owner.is_module:
            return self._in_module(owner.module, name, depth)
        if owner.is_class:
            return self._in_class(owner, name, depth)
        return Resolution(Outcome.UNKNOWN, reason=f"the type of {owner.path or 'it'} is known only at run time")

    def _in_module(self, module: str, name: str, depth: int) -> Resolution:
        content = self._read(module)
        if isinstance(content, str):
            return Resolution(Outcome.UNKNOWN, module, name, reason=content)
        symbols = content.names.get(name, [])
        running = [symbol for symbol in symbols if not symbol.for_type_checkers]
        if running:
            return self._follow(content, name, running, depth)
        imported = self._from_star(content, name, depth)
        if imported is not None and imported.is_found:
            return imported
        if self._exists(f"{module}.{name}"):
            return Resolution(Outcome.FOUND, f"{module}.{name}")
        if name in _MODULE_NAMES:
            return Resolution(Outcome.FOUND, module, name)
        if content.is_lazy and (content.lazy_names is None or name in content.lazy_names):
            if symbols:
                return self._follow(content, name, symbols, depth)
            if content.lazy_names is not None:
                return Resolution(Outcome.FOUND, module, name)
            return Resolution(Outcome.UNKNOWN, module, name, reason=f"{module} creates names on demand (__getattr__)")
        if imported is not None:
            return imported
        if symbols:
            return Resolution(Outcome.MISSING, module, name, reason=f"{module} has {name} for type checkers only")
        return Resolution(Outcome.MISSING, module, name, reason=f"{module} has no {name}")

    def _follow(self, content: ModuleSymbols, name: str, symbols: list[Symbol], depth: int) -> Resolution:
        """Returns the definition behind a name that a module binds, perhaps several times."""
        defined = [symbol for symbol in symbols if symbol.binds in (Binds.CLASS, Binds.FUNCTION)]
        if defined:
            return Resolution(Outcome.FOUND, content.name, name, defined[-1])
        for symbol in symbols:
            if symbol.binds is Binds.IMPORT:
                target = self._import(symbol, depth)
                if target is not None and target.is_found:
                    return target
            elif symbol.target and symbol.target.partition(".")[0] != name:
                first, *rest = symbol.target.split(".")
                if first in content.names:
                    target = self._in_module(content.name, first, depth + 1)
                    for part in rest:
                        target = self._member(target, part, depth + 1)
                    # 'X = Y' is an alias if Y is a class or a function. If Y is a value, X is a definition of its own.
                    if target.is_found and target.symbol is not None and target.symbol.binds is not Binds.ASSIGNMENT:
                        return target
        own = [symbol for symbol in symbols if symbol.binds is not Binds.IMPORT]
        # A name whose import leads out of the trees exists, but its definition is not known.
        return Resolution(Outcome.FOUND, content.name, name, own[-1] if own else None)

    def _import(self, symbol: Symbol, depth: int) -> Resolution | None:
        if self.tree_of(symbol.target) is None:
            return None
        if depth > _MAX_DEPTH:
            return None
        return self._resolve(symbol.target, [symbol.attribute] if symbol.attribute else [], depth + 1)

    def _from_star(self, content: ModuleSymbols, name: str, depth: int) -> Resolution | None:
        """Returns what a star import brings in under the name, or None if none can."""
        if name.startswith("_") or depth > _MAX_DEPTH:
            return None
        stars = self._star_imports_of(content)
        unknown = Resolution(Outcome.UNKNOWN, content.name, name, reason=stars.unknown[-1]) if stars.unknown else None
        for origin in stars.origins.get(name, ()):
            found = self._resolve(origin, [name], depth + 1)
            if found.is_found:
                return found
            if found.outcome is Outcome.UNKNOWN:
                unknown = found
        return unknown

    def _star_imports_of(self, content: ModuleSymbols) -> StarImports:
        if not content.star_imports:
            return NO_STAR_IMPORTS
        known = self._star_imports.get(content.name)
        if known is None:
            known = self._star_imports[content.name] = resolve_star_imports(content, self._read, self.tree_of)
        return known

    # --- classes

    def _in_class(self, owner: Resolution, name: str, depth: int) -> Resolution:
        ancestors = self._ancestors_of(owner, depth)
        for module, qualname, body in ancestors.classes:
            running = [symbol for symbol in body.members.get(name, ()) if not symbol.for_type_checkers]
            if running:
                definitions = (Binds.FUNCTION, Binds.CLASS, Binds.PROPERTY)
                defined = [symbol for symbol in running if symbol.binds in definitions]
                # Of a property, the getter and not the setter.
                getters = [symbol for symbol in defined if symbol.signature is not None]
                found = (getters if defined and defined[-1].binds is Binds.PROPERTY else ()) or defined or running
                return Resolution(Outcome.FOUND, module, f"{qualname}.{name}", found[-1])
        path = f"{owner.qualname}.{name}"
        metaclass = ancestors.metaclass
        if name in ancestors.builtin_attributes or name in _CLASS_NAMES:
            return Resolution(Outcome.FOUND, owner.module, path)
        if metaclass is not None:
            for _, _, body in metaclass.classes:
                if name in body.members or body.has_dynamic_attributes:
                    return Resolution(Outcome.FOUND, owner.module, path)
            if name in metaclass.builtin_attributes:
                return Resolution(Outcome.FOUND, owner.module, path)
        unknown = [*ancestors.unknown_bases, *(metaclass.unknown_bases if metaclass is not None else ())]
        if unknown:
            return Resolution(
                Outcome.UNKNOWN,
                owner.module,
                path,
                reason=f"it may come from the base {unknown[0]}, outside the source trees",
            )
        if name.startswith("__") and name.endswith("__"):
            return Resolution(Outcome.UNKNOWN, owner.module, path, reason="a decorator or Python may provide it")
        if any(body.has_dynamic_attributes for _, _, body in ancestors.classes):
            return Resolution(Outcome.UNKNOWN, owner.module, path, reason=f"{owner.qualname} has a __getattr__")
        return Resolution(Outcome.MISSING, owner.module, path, reason=f"{owner.path} has no {name}")

    def _ancestors_of(self, owner: Resolution, depth: int) -> Ancestors:
        key = (owner.module, owner.qualname)
        known = self._ancestors.get(key)
        if known is None:
            # A class that inherits from itself, which only broken source has, would recurse without end.
            assert owner.symbol is not None and owner.symbol.body is not None
            self._ancestors[key] = Ancestors(((*key, owner.symbol.body),), (), frozenset())
            known = self._ancestors[key] = self._linearise(owner, owner.symbol.body, depth)
        return known

    def _linearise(self, owner: Resolution, body: ClassBody, depth: int) -> Ancestors:
        """Returns a class with its bases in the order of Python's MRO."""
        orders: list[list[tuple[str, str, ClassBody]]] = []
        unknown: list[str] = []
        builtin: set[str] = set()
        metaclass: Ancestors | None = None
        for base in body.bases:
            found = self._base(owner, base, depth)
            if found.is_class:
                inherited = self._ancestors_of(found, depth + 1)
                orders.append(list(inherited.classes))
                unknown += inherited.unknown_bases
                builtin |= inherited.builtin_attributes
                metaclass = metaclass or inherited.metaclass
            else:
                names = _standard_attributes(found.reason)
                if names is None:
                    unknown.append(found.reason or base or "an expression")
                else:
                    builtin |= names
        if body.metaclass:
            found = self._base(owner, body.metaclass, depth)
            if found.is_class:
                metaclass = self._ancestors_of(found, depth + 1)
            else:
                names = _standard_attributes(found.reason)
                external = (found.reason or body.metaclass,) if names is None else ()
                metaclass = Ancestors((), external, frozenset(names or ()))
        merged = _merge([*orders, [order[0] for order in orders]])
        own = (owner.module, owner.qualname, body)
        return Ancestors((own, *merged), tuple(dict.fromkeys(unknown)), frozenset(builtin), metaclass)

    def _base(self, owner: Resolution, written: str, depth: int) -> Resolution:
        """Returns a base class by its name in the module of the class. For one outside the trees, `reason` is its full
        dotted name."""
        if not written:
            return Resolution(Outcome.UNKNOWN)
        first, *rest = written.split(".")
        content = self.module(owner.module)
        symbols = content.names.get(first, []) if content is not None else []
        if not symbols and first in _BUILTINS:
            return Resolution(Outcome.UNKNOWN, reason=f"builtins.{written}")
        for symbol in symbols:
            if symbol.binds is Binds.IMPORT and self.tree_of(symbol.target) is None:
                names = [symbol.target, symbol.attribute, *rest]
                outside = ".".join(name for name in names if name)
                found = Resolution(Outcome.UNKNOWN, reason=outside)
                if len(symbols) == 1:
                    return found
        found = self._in_module(owner.module, first, depth + 1)
        for part in rest:
            found = self._member(found, part, depth + 1)
        return found if found.is_class else Resolution(Outcome.UNKNOWN, reason=f"{owner.module}.{written}")

    def _definitions(self, found: Resolution) -> list[Symbol]:
        """Returns all bindings of a name that apply at run time, in source order."""
        assert found.symbol is not None
        owner, _, name = found.qualname.rpartition(".")
        if owner:
            holder = self.resolve(found.module, owner).symbol
            symbols = list(holder.body.members.get(name, ())) if holder is not None and holder.body is not None else []
        else:
            content = self.module(found.module)
            symbols = content.names.get(name, []) if content is not None else []
        running = [symbol for symbol in symbols if not symbol.for_type_checkers and symbol.binds is not Binds.IMPORT]
        return sorted(running or [found.symbol], key=lambda symbol: symbol.line)


def _parse(tree: SourceTree, name: str) -> ModuleSymbols | str:
    """Returns what a module binds, or the reason why it cannot be read."""
    try:
        text = tree.read(name)
        if text is None:
            if tree.is_compiled(name):
                return f"{name} is compiled"
            if tree.is_package(name):
                return ModuleSymbols(name, is_package=True)
            return f"there is no module {name}"
        return read_module(name, text, is_package=tree.is_package(name))
    except SourceError as fault:
        return str(fault)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        return f"{tree.file_of(name)} cannot be parsed: {fault}"


class _Enumeration(enum.Enum):
    A = 1


class _Abstract(Protocol):
    pass


_ENUM_ATTRIBUTES = frozenset(vars(_Enumeration)) - {"A"} | {"name", "value", "_name_", "_value_"}
_ABSTRACT_ATTRIBUTES = frozenset(vars(_Abstract)) | frozenset(dir(object))
_BUILTINS = frozenset(dir(importlib.import_module("builtins")))


def _standard_attributes(base: str) -> frozenset[str] | None:
    """Returns the attributes of a base class from the standard library, or None for any other."""
    module, _, name = base.rpartition(".")
    if module in _TYPING and name in _TYPING_BASES:
        return _ABSTRACT_ATTRIBUTES
    if module not in _STANDARD_MODULES:
        return None
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type):
        return None
    return frozenset(dir(found)) | (_ENUM_ATTRIBUTES if module == "enum" else _ABSTRACT_ATTRIBUTES)


def _merge(orders: list[list[tuple[str, str, ClassBody]]]) -> list[tuple[str, str, ClassBody]]:
    """Merges the orders of several bases by Python's C3 rule. Where no such order exists, or where bases outside the
    trees hide it, the classes keep the order in which they are named."""
    pending = [list(order) for order in orders if order]
    merged: list[tuple[str, str, ClassBody]] = []
    while pending:
        head = next(
            (
                order[0]
                for order in pending
                if not any(_key(order[0]) in {_key(entry) for entry in other[1:]} for other in pending)
            ),
            pending[0][0],
        )
        merged.append(head)
        pending = [rest for order in pending if (rest := [entry for entry in order if _key(entry) != _key(head)])]
    return merged


def _key(entry: tuple[str, str, ClassBody]) -> tuple[str, str]:
    return entry[0], entry[1]
