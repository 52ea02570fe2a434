"""The audited plugin: its files as modules, and what all of them together say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_backplane.audit.conditions import Condition
from vllm_backplane.audit.facts import Fact, FileFacts, ModuleFact, PatchFact, VariableFact
from vllm_backplane.upstream.source import LARGEST_MODULE, SourceError, SourceTree, Wheel, decoded


@dataclass(frozen=True, slots=True)
class PluginFile:
    """One Python file to audit."""

    name: str
    """Relative to what is audited, with forward slashes."""
    module: str
    is_package: bool
    path: Path | None
    """None for a file in a wheel."""


class PluginTree(SourceTree):
    """The plugin's own modules, so that names can be followed through them into vLLM."""

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


def read_source(file: PluginFile, wheel: Wheel | None, most: int = LARGEST_MODULE) -> str:
    if file.path is None:
        assert wheel is not None
        content = wheel.content(file.name)
    else:
        try:
            if not file.path.is_file():
                raise SourceError("it is a link that leads nowhere" if file.path.is_symlink() else "it is not a file")
            size = file.path.stat().st_size
            if size > most:
                raise SourceError(f"it has {size / 2**20:.1f} MiB; more than {most / 2**20:g} MiB are not analysed")
            content = file.path.read_bytes()
        except OSError as fault:
            raise SourceError(f"it cannot be read: {fault.strerror or fault}") from fault
    if len(content) > most:
        raise SourceError(f"it has {len(content) / 2**20:.1f} MiB; more than {most / 2**20:g} MiB are not analysed")
    return decoded(content, "it")


@dataclass(slots=True)
class Plugin:
    files: tuple[PluginFile, ...]
    tree: PluginTree
    packages: frozenset[str]
    """Top-level names of the plugin's modules."""
    facts: Mapping[str, list[Fact]] = field(default_factory=dict)
    """By file."""
    attributes_read: frozenset[str] = frozenset()
    attributes_set: frozenset[str] = frozenset()
    variables_read: frozenset[str] = frozenset()
    variables_declared: frozenset[str] = frozenset()
    modules_provided: frozenset[str] = frozenset()
    """Modules of vLLM that the plugin puts in place itself."""
    names_registered: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()
    flags: Mapping[str, Condition] = field(default_factory=dict)
    """Conditions that one file keeps and others ask for, by dotted name."""

    def gather(self, read: Iterable[FileFacts]) -> None:
        read = list(read)
        facts = [fact for file in read for fact in file.facts]
        self.facts = {file.file: file.facts for file in read}
        self.attributes_read = frozenset().union(*(file.attributes_read for file in read))
        self.attributes_set = frozenset().union(*(file.attributes_set for file in read)) | frozenset(
            fact.attribute for fact in facts if isinstance(fact, PatchFact)
        )
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
