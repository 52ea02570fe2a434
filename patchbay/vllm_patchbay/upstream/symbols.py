"""What a name in a source tree means: following re-exports, base classes, star imports and lazy modules.

The answer is found, missing or unknown. Unknown is for what source alone does not tell: compiled modules, names that a
module makes up on demand, attributes that a base class outside the trees may have. It is never rounded to missing.
"""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Protocol

from vllm_patchbay.upstream.modules import Binds, ClassBody, ModuleSymbols, Symbol, read_module
from vllm_patchbay.upstream.normalized import fingerprint, normalised
from vllm_patchbay.upstream.signatures import Signature
from vllm_patchbay.upstream.source import SourceError, SourceTree
from vllm_patchbay.upstream.star_imports import NOTHING, Starred, starred


class Outcome(StrEnum):
    FOUND = "found"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Resolution:
    outcome: Outcome
    module: str = ""
    """Where it is defined, after following re-exports."""
    qualname: str = ""
    """Within that module; empty if the thing is the module."""
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
        """``module:qualname``."""
        return f"{self.module}:{self.qualname}" if self.qualname else self.module


@dataclass(frozen=True, slots=True)
class Ancestors:
    """A class and what it inherits from, in the order in which Python would look."""

    classes: tuple[tuple[str, str, ClassBody], ...]
    """Module, qualified name and content."""
    outside: tuple[str, ...]
    """Dotted names of bases whose attributes are not known."""
    known_outside: frozenset[str]
    """Attributes of bases that come from Python itself."""
    metaclass: Ancestors | None = None


_MODULE_NAMES = frozenset(dir(ModuleType)) | {name for name in dir(importlib) if name.startswith("__")}
_CLASS_NAMES = frozenset(dir(type)) | frozenset(dir(object))
_OF_PYTHON = frozenset(
    {"abc", "argparse", "builtins", "collections", "collections.abc", "enum", "logging", "threading"}
)
_TYPING = frozenset({"typing", "typing_extensions"})
_TYPING_BASES = frozenset({"Generic", "Protocol"})
_DEEPEST = 60


class SymbolIndex:
    """Looks names up in one or more source trees. Modules are parsed when they are first needed, and kept."""

    def __init__(self, *trees: SourceTree) -> None:
        self.trees = {tree.package: tree for tree in trees}
        self._ancestors: dict[tuple[str, str], Ancestors] = {}
        self._stars: dict[str, Starred] = {}

    def tree_of(self, module: str) -> SourceTree | None:
        return self.trees.get(module.partition(".")[0])

    def module(self, name: str) -> ModuleSymbols | None:
        """What a module binds; None if it is not there or cannot be read, which `resolve` tells apart."""
        found = self._read(name)
        return found if isinstance(found, ModuleSymbols) else None

    def resolve(self, module: str, qualname: str = "") -> Resolution:
        """What ``module:qualname`` means, as code that runs would see it."""
        return self._resolve(module, qualname.split(".") if qualname else [], 0)

    def resolve_path(self, path: str) -> Resolution:
        """As `resolve`, for ``a.b.C.d`` or ``a.b:C.d``. The longest prefix that is a module is taken as the module,
        unless a package on the way binds the name to something else."""
        if ":" in path:
            module, _, qualname = path.partition(":")
            return self.resolve(module, qualname)
        first, *rest = path.split(".")
        return self._resolve(first, rest, 0)

    def member(self, owner: Resolution, name: str) -> Resolution:
        """An attribute of something already resolved."""
        return self._member(owner, name, 0)

    def ancestors(self, module: str, qualname: str) -> Ancestors | None:
        """Of a class; None if ``module:qualname`` is none."""
        found = self.resolve(module, qualname)
        return self._line(found, 0) if found.is_class else None

    def signature_of(self, module: str, qualname: str) -> Signature | None:
        """Of a function or method, its first parameter included; None if it is neither."""
        symbol = self.resolve(module, qualname).symbol
        return symbol.signature if symbol is not None else None

    def kinds_of(self, found: Resolution) -> frozenset[Binds]:
        """How the name comes to be, in all branches that run; empty for what is not bound in the source."""
        return (
            frozenset(symbol.binds for symbol in self._definitions(found)) if found.symbol is not None else frozenset()
        )

    def is_imported(self, module: str, name: str) -> bool:
        """Whether the module has the name from an import and from nothing else."""
        content = self.module(module)
        symbols = [s for s in content.names.get(name, ()) if not s.for_type_checkers] if content is not None else []
        return bool(symbols) and all(symbol.binds is Binds.IMPORT for symbol in symbols)

    def source_of(self, module: str, qualname: str) -> str:
        """The text of the definition, decorators included, indented as it is. Definitions in several branches come
        one after the other. SourceError if it is not found or is not a definition."""
        found = self.resolve(module, qualname)
        wanted = f"{module}:{qualname}"
        if not found.is_found:
            raise SourceError(f"{wanted} is {found.outcome}: {found.reason}")
        if found.symbol is None:
            raise SourceError(f"{wanted} is not a definition in the source of {self._named(module)}")
        tree = self.tree_of(found.module)
        text = tree.read(found.module) if tree is not None else None
        assert text is not None
        lines = text.splitlines(keepends=True)
        parts = ["".join(lines[s.line - 1 : s.end_line]) for s in self._definitions(found)]
        return "".join(part if part.endswith("\n") else part + "\n" for part in parts)

    def normalised_source_of(self, module: str, qualname: str) -> str:
        return normalised(self.source_of(module, qualname))

    def fingerprint_of(self, module: str, qualname: str) -> str:
        return fingerprint(self.source_of(module, qualname))

    # --- modules

    def _named(self, module: str) -> str:
        tree = self.tree_of(module)
        return tree.name if tree is not None else module

    def _read(self, name: str) -> ModuleSymbols | str:
        """The content of a module, or why there is none."""
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
        if depth > _DEEPEST:
            return Resolution(Outcome.UNKNOWN, reason=f"imports lead in a circle at {owner.path}")
        if not owner.is_found:
            return owner
        if owner.is_module:
            return self._in_module(owner.module, name, depth)
        if owner.is_class:
            return self._in_class(owner, name, depth)
        return Resolution(Outcome.UNKNOWN, reason=f"what kind of object {owner.path or 'it'} is, is known at run time")

    def _in_module(self, module: str, name: str, depth: int) -> Resolution:
        content = self._read(module)
        if isinstance(content, str):
            return Resolution(Outcome.UNKNOWN, module, name, reason=content)
        symbols = content.names.get(name, [])
        running = [symbol for symbol in symbols if not symbol.for_type_checkers]
        if running:
            return self._follow(content, name, running, depth)
        starred = self._from_star(content, name, depth)
        if starred is not None and starred.is_found:
            return starred
        if self._exists(f"{module}.{name}"):
            return Resolution(Outcome.FOUND, f"{module}.{name}")
        if name in _MODULE_NAMES:
            return Resolution(Outcome.FOUND, module, name)
        if content.is_lazy and (content.lazy_names is None or name in content.lazy_names):
            if symbols:
                return self._follow(content, name, symbols, depth)
            if content.lazy_names is not None:
                return Resolution(Outcome.FOUND, module, name)
            return Resolution(Outcome.UNKNOWN, module, name, reason=f"{module} makes names up on demand (__getattr__)")
        if starred is not None:
            return starred
        if symbols:
            return Resolution(Outcome.MISSING, module, name, reason=f"{module} has {name} for type checkers only")
        return Resolution(Outcome.MISSING, module, name, reason=f"{module} has no {name}")

    def _follow(self, content: ModuleSymbols, name: str, symbols: list[Symbol], depth: int) -> Resolution:
        """The definition behind a name that is bound here, perhaps several times."""
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
                    # 'X = Y' where Y is a class or a function is one; where Y is a value, X is where it is defined.
                    if target.is_found and target.symbol is not None and target.symbol.binds is not Binds.ASSIGNMENT:
                        return target
        own = [symbol for symbol in symbols if symbol.binds is not Binds.IMPORT]
        # Bound by an import that leads out of the trees: it is there, and what it is, is not known.
        return Resolution(Outcome.FOUND, content.name, name, own[-1] if own else None)

    def _import(self, symbol: Symbol, depth: int) -> Resolution | None:
        if self.tree_of(symbol.target) is None:
            return None
        if depth > _DEEPEST:
            return None
        return self._resolve(symbol.target, [symbol.attribute] if symbol.attribute else [], depth + 1)

    def _from_star(self, content: ModuleSymbols, name: str, depth: int) -> Resolution | None:
        """None if no star import can have brought the name."""
        if name.startswith("_") or depth > _DEEPEST:
            return None
        stars = self._starred(content)
        unknown = Resolution(Outcome.UNKNOWN, content.name, name, reason=stars.unknown[-1]) if stars.unknown else None
        for origin in stars.origins.get(name, ()):
            found = self._resolve(origin, [name], depth + 1)
            if found.is_found:
                return found
            if found.outcome is Outcome.UNKNOWN:
                unknown = found
        return unknown

    def _starred(self, content: ModuleSymbols) -> Starred:
        if not content.star_imports:
            return NOTHING
        known = self._stars.get(content.name)
        if known is None:
            known = self._stars[content.name] = starred(content, self._read, self.tree_of)
        return known

    # --- classes

    def _in_class(self, owner: Resolution, name: str, depth: int) -> Resolution:
        line = self._line(owner, depth)
        for module, qualname, body in line.classes:
            running = [symbol for symbol in body.members.get(name, ()) if not symbol.for_type_checkers]
            if running:
                definitions = (Binds.FUNCTION, Binds.CLASS, Binds.PROPERTY)
                defined = [symbol for symbol in running if symbol.binds in definitions]
                # Of a property, what reads it rather than what sets it.
                getters = [symbol for symbol in defined if symbol.signature is not None]
                found = (getters if defined and defined[-1].binds is Binds.PROPERTY else ()) or defined or running
                return Resolution(Outcome.FOUND, module, f"{qualname}.{name}", found[-1])
        path = f"{owner.qualname}.{name}"
        if name in line.known_outside or name in _CLASS_NAMES:
            return Resolution(Outcome.FOUND, owner.module, path)
        if line.metaclass is not None:
            for _, _, body in line.metaclass.classes:
                if name in body.members or body.answers_for_any_name:
                    return Resolution(Outcome.FOUND, owner.module, path)
            if name in line.metaclass.known_outside:
                return Resolution(Outcome.FOUND, owner.module, path)
        outside = [*line.outside, *(line.metaclass.outside if line.metaclass is not None else ())]
        if outside:
            return Resolution(
                Outcome.UNKNOWN, owner.module, path, reason=f"it may come from the base {outside[0]}, outside the trees"
            )
        if name.startswith("__") and name.endswith("__"):
            return Resolution(Outcome.UNKNOWN, owner.module, path, reason="a decorator or Python may provide it")
        if any(body.answers_for_any_name for _, _, body in line.classes):
            return Resolution(Outcome.UNKNOWN, owner.module, path, reason=f"{owner.qualname} has a __getattr__")
        return Resolution(Outcome.MISSING, owner.module, path, reason=f"{owner.path} has no {name}")

    def _line(self, owner: Resolution, depth: int) -> Ancestors:
        key = (owner.module, owner.qualname)
        known = self._ancestors.get(key)
        if known is None:
            # A class that inherits from itself, which only broken source does, ends here instead of never.
            assert owner.symbol is not None and owner.symbol.body is not None
            self._ancestors[key] = Ancestors(((*key, owner.symbol.body),), (), frozenset())
            known = self._ancestors[key] = self._linearise(owner, owner.symbol.body, depth)
        return known

    def _linearise(self, owner: Resolution, body: ClassBody, depth: int) -> Ancestors:
        lines: list[list[tuple[str, str, ClassBody]]] = []
        outside: list[str] = []
        known: set[str] = set()
        metaclass: Ancestors | None = None
        for base in body.bases:
            found = self._base(owner, base, depth)
            if found.is_class:
                line = self._line(found, depth + 1)
                lines.append(list(line.classes))
                outside += line.outside
                known |= line.known_outside
                metaclass = metaclass or line.metaclass
            else:
                names = _names_of_python(found.reason)
                if names is None:
                    outside.append(found.reason or base or "an expression")
                else:
                    known |= names
        if body.metaclass:
            found = self._base(owner, body.metaclass, depth)
            if found.is_class:
                metaclass = self._line(found, depth + 1)
            else:
                names = _names_of_python(found.reason)
                external = (found.reason or body.metaclass,) if names is None else ()
                metaclass = Ancestors((), external, frozenset(names or ()))
        merged = _merge([*lines, [line[0] for line in lines]])
        own = (owner.module, owner.qualname, body)
        return Ancestors((own, *merged), tuple(dict.fromkeys(outside)), frozenset(known), metaclass)

    def _base(self, owner: Resolution, written: str, depth: int) -> Resolution:
        """A base class by the name it has in the module of the class. For one outside the trees, `reason` is its full
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
        """All bindings of the name that count at run time, in the order of the source."""
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


_OF_ENUMERATIONS = frozenset(vars(_Enumeration)) - {"A"} | {"name", "value", "_name_", "_value_"}
_OF_ABSTRACT_CLASSES = frozenset(vars(_Abstract)) | frozenset(dir(object))
_BUILTINS = frozenset(dir(importlib.import_module("builtins")))


def _names_of_python(base: str) -> frozenset[str] | None:
    """The attributes of a base class that comes with Python, None for any other."""
    module, _, name = base.rpartition(".")
    if module in _TYPING and name in _TYPING_BASES:
        return _OF_ABSTRACT_CLASSES
    if module not in _OF_PYTHON:
        return None
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type):
        return None
    return frozenset(dir(found)) | (_OF_ENUMERATIONS if module == "enum" else _OF_ABSTRACT_CLASSES)


def _merge(lines: list[list[tuple[str, str, ClassBody]]]) -> list[tuple[str, str, ClassBody]]:
    """Python's order of inheritance (C3). Where that does not exist, or bases outside the trees hide it, the order in
    which the classes are named."""
    pending = [list(line) for line in lines if line]
    merged: list[tuple[str, str, ClassBody]] = []
    while pending:
        head = next(
            (
                line[0]
                for line in pending
                if not any(_key(line[0]) in {_key(entry) for entry in other[1:]} for other in pending)
            ),
            pending[0][0],
        )
        merged.append(head)
        pending = [rest for line in pending if (rest := [entry for entry in line if _key(entry) != _key(head)])]
    return merged


def _key(entry: tuple[str, str, ClassBody]) -> tuple[str, str]:
    return entry[0], entry[1]
