"""Defines the audited plugin: its files as modules, and the facts of all files together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_patchbay.audit.conditions import Condition
from vllm_patchbay.audit.facts import (
    CallFact,
    Fact,
    FileFacts,
    ModuleFact,
    PatchFact,
    UnresolvedFact,
    UseFact,
    VariableFact,
)
from vllm_patchbay.upstream.source import MAX_MODULE_BYTES, SourceError, SourceTree, Wheel, decode_source
from vllm_patchbay.upstream.symbols import SymbolIndex


@dataclass(frozen=True, slots=True)
class PluginFile:
    """Describes one Python file to audit."""

    name: str
    """Path relative to the audited folder or wheel, with forward slashes."""
    module: str
    """Dotted name under which the file would be imported."""
    is_package: bool
    path: Path | None
    """Path on disk; None for a file in a wheel."""


class PluginTree(SourceTree):
    """Reads the plugin's own modules as a source tree, so that a name can be resolved through them into vLLM."""

    package = ""
    version = ""
    name = "the plugin"

    def __init__(self, files: Iterable[PluginFile], wheel: Wheel | None = None) -> None:
        self._files: dict[str, PluginFile] = {}
        for file in files:
            self._files.setdefault(file.module, file)
        self._wheel = wheel
        parts = (module.split(".") for module in self._files)
        self._packages = frozenset(".".join(names[:count]) for names in parts for count in range(1, len(names)))

    def modules(self) -> Iterable[str]:
        return self._files.keys()

    def read(self, module: str) -> str | None:
        file = self._files.get(module)
        return read_source(file, self._wheel) if file is not None else None

    def is_package(self, module: str) -> bool:
        file = self._files.get(module)
        return module in self._packages or (file is not None and file.is_package)

    def is_compiled(self, module: str) -> bool:
        return False

    def file_of(self, module: str) -> str:
        file = self._files.get(module)
        return file.name if file is not None else module


def read_source(file: PluginFile, wheel: Wheel | None, max_bytes: int = MAX_MODULE_BYTES) -> str:
    """Returns the text of a file. Raises SourceError if it cannot be read or has more than `max_bytes`."""
    if file.path is None:
        assert wheel is not None
        content = wheel.content(file.name)
    else:
        try:
            if not file.path.is_file():
                raise SourceError("it is a broken link" if file.path.is_symlink() else "it is not a regular file")
            _check_size(file.path.stat().st_size, max_bytes)
            content = file.path.read_bytes()
        except OSError as fault:
            raise SourceError(f"it cannot be read: {fault.strerror or fault}") from fault
    _check_size(len(content), max_bytes)
    return decode_source(content, "it")


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise SourceError(
            f"it has {size / 2**20:.1f} MiB; files of more than {max_bytes / 2**20:g} MiB are not analysed"
        )


@dataclass(slots=True)
class Plugin:
    """Describes the audited plugin. `gather` fills in the fields from `facts` on."""

    files: tuple[PluginFile, ...]
    tree: PluginTree
    packages: frozenset[str]
    """Top-level names of the plugin's modules."""
    facts: Mapping[str, list[Fact]] = field(default_factory=dict)
    """Facts of each file."""
    attributes_read: frozenset[str] = frozenset()
    attributes_set: frozenset[str] = frozenset()
    variables_read: frozenset[str] = frozenset()
    variables_declared: frozenset[str] = frozenset()
    modules_provided: frozenset[str] = frozenset()
    """Modules of vLLM that the plugin itself puts into ``sys.modules``."""
    names_registered: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()
    reads: Mapping[str, set[tuple[str, str]]] = field(default_factory=dict)
    """For each attribute that the plugin sets on an object of vLLM: the kinds and dotted names of the objects that the
    plugin reads it from, as in `FileFacts.reads`."""
    uses: Mapping[str, list[tuple[str, int, UseFact]]] = field(default_factory=dict)
    """For the same attributes: file, number and fact of each read by full name."""
    operands: frozenset[tuple[str, str]] = frozenset()
    version_dependent: frozenset[str] = frozenset()
    flags: Mapping[str, Condition] = field(default_factory=dict)
    """Conditions that one file stores and another file may test, by dotted name."""

    def gather(self, read: Iterable[FileFacts]) -> None:
        """Combines the facts of all files."""
        read = list(read)
        self._resolve_setters(read)
        facts = [fact for file in read for fact in file.facts]
        self.facts = {file.file: file.facts for file in read}
        self.attributes_read = frozenset().union(*(file.attributes_read for file in read))
        self.attributes_set = frozenset().union(*(file.attributes_set for file in read)) | frozenset(
            fact.attribute for fact in facts if isinstance(fact, PatchFact)
        )
        self._gather_reads(read, frozenset(fact.attribute for fact in facts if isinstance(fact, PatchFact)))
        self.version_dependent = frozenset().union(*(file.version_dependent for file in read))
        constants = {path: name for file in read for path, name in file.constants.items()}
        by_constant = frozenset().union(*(file.declared_by_constant for file in read))
        self.variables_declared = frozenset().union(*(file.variables_declared for file in read)) | frozenset(
            constants[path] for path in by_constant & constants.keys()
        )
        self.flags = {path: condition for file in read for path, condition in file.flags.items()}
        self.classes = frozenset().union(*(file.classes for file in read))
        self.names_registered = frozenset().union(*(file.names_registered for file in read))
        self.variables_read = frozenset().union(*(file.variables_mentioned for file in read)) | frozenset(
            fact.name for fact in facts if isinstance(fact, VariableFact) and not fact.is_written
        )
        self.modules_provided = frozenset(fact.module for fact in facts if isinstance(fact, ModuleFact))

    def _gather_reads(self, read: list[FileFacts], patched: frozenset[str]) -> None:
        reads: dict[str, set[tuple[str, str]]] = {}
        uses: dict[str, list[tuple[str, int, UseFact]]] = {}
        for file in read:
            for attribute, kind, key in file.reads:
                if attribute in patched:
                    reads.setdefault(attribute, set()).add((kind, key))
            for number, fact in enumerate(file.facts):
                if isinstance(fact, UseFact):
                    for attribute in {m.ref.rest[-1] for m in fact.meanings if m.ref.rest} & patched:
                        uses.setdefault(attribute, []).append((file.file, number, fact))
        self.reads, self.uses = reads, uses
        self.operands = frozenset().union(*(file.operands for file in read))

    def _resolve_setters(self, read: list[FileFacts]) -> None:
        """Turns calls of another file's function that sets an attribute by name into patch facts."""
        setters = {path: positions for file in read for path, positions in file.setters.items()}
        index = SymbolIndex()
        index.trees.update(dict.fromkeys(self.packages, self.tree))
        for file in read if setters else ():
            for number, fact in enumerate(file.facts):
                if isinstance(fact, CallFact):
                    found = index.resolve_path(fact.function)
                    positions = setters.get(f"{found.module}.{found.qualname}")
                    if positions is not None and max(positions) < len(fact.arguments):
                        file.facts[number] = _patch_of(fact, *positions)


def _patch_of(call: CallFact, owner: int, name: int) -> Fact:
    owners, attribute, place = call.arguments[owner][0], call.arguments[name][1], call.arguments[name][2]
    if attribute is not None:
        return PatchFact(place, owners, attribute)
    path = owners[0].ref.path if owners else "an unknown object"
    return UnresolvedFact(call.place, f"the name of the attribute set on {path} is computed at run time")
