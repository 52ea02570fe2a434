"""Reads the Python source of a package from a folder, a wheel or a source archive, without importing it.

Archives are read in place and are not trusted: an entry is read only if its name is a relative path that stays below
the archive's root, and only up to a size far above that of any real module.
"""

from __future__ import annotations

import io
import os
import tarfile
import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream.versions import declared_version, version_in

MAX_MODULE_BYTES = 16 * 2**20
"""Limit of one module. vLLM's largest has about 0.3 MiB."""

MAX_SOURCE_BYTES = 1024 * 2**20
"""Limit of all modules of an archive together."""

MAX_ENTRIES = 200_000

COMPILED = (".so", ".pyd")
"""Suffixes of compiled modules."""


class SourceError(PatchbayError):
    """Reports that a source tree, or one file of it, cannot be read."""


class SourceTree(ABC):
    """Gives access to the Python modules of one version of a package, by dotted name."""

    name: str
    """Name of the tree in reports, such as ``vllm 0.32.0``."""

    version: str
    """Version of the package; empty if the tree does not declare one."""

    package: str

    @abstractmethod
    def modules(self) -> Iterable[str]:
        """Returns the names of all modules that have Python source, packages included."""

    @abstractmethod
    def read(self, module: str) -> str | None:
        """Returns the source of a module, or None if it has none. Raises SourceError if its file cannot be read."""

    @abstractmethod
    def is_package(self, module: str) -> bool:
        """Returns whether the module can contain modules. A folder without ``__init__.py`` is a package too."""

    @abstractmethod
    def is_compiled(self, module: str) -> bool:
        """Returns whether the module is a compiled extension, so that its names cannot be read."""

    @abstractmethod
    def file_of(self, module: str) -> str:
        """Returns the path of the module's file within the tree, for reports."""

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Holds results that were computed from the source, so that each is computed once per process. It is left out
        when the tree is pickled."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "derived"}

    def has(self, module: str) -> bool:
        """Returns whether the module exists, as source, as a package or as a compiled extension."""
        return module in self.module_names or self.is_package(module) or self.is_compiled(module)

    @cached_property
    def module_names(self) -> frozenset[str]:
        return frozenset(self.modules())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class FolderTree(SourceTree):
    """Reads a package from its own folder: the one that has the ``__init__.py``."""

    def __init__(self, folder: Path, version: str = "", package: str = "vllm") -> None:
        self.folder = folder
        self.package = package
        self.version = version or version_in(folder) or _version_beside(folder, package)
        self.name = f"{package} {self.version or f'in {folder}'}"

    def modules(self) -> Iterator[str]:
        # Links are not followed: a loop of links would never end, and packages do not need them.
        for folder, folders, files in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if name.isidentifier())
            parts = [self.package, *Path(folder).relative_to(self.folder).parts]
            for file in sorted(files):
                name, suffix = os.path.splitext(file)
                if suffix == ".py" and name.isidentifier():
                    yield ".".join(parts if name == "__init__" else [*parts, name])

    def read(self, module: str) -> str | None:
        path = self._path(module)
        for candidate in (path / "__init__.py", path.with_name(path.name + ".py")):
            if candidate.is_file():
                if candidate.stat().st_size > MAX_MODULE_BYTES:
                    raise SourceError(f"{candidate} is not read: it has more than {MAX_MODULE_BYTES >> 20} MiB")
                try:
                    return decode_source(candidate.read_bytes(), str(candidate))
                except OSError as fault:
                    raise SourceError(f"{candidate} cannot be read: {fault.strerror}") from fault
        return None

    def is_package(self, module: str) -> bool:
        return self._path(module).is_dir()

    def is_compiled(self, module: str) -> bool:
        return module in self._compiled

    def file_of(self, module: str) -> str:
        path = self._path(module)
        return f"{module.replace('.', '/')}/__init__.py" if path.is_dir() else f"{module.replace('.', '/')}.py"

    @cached_property
    def _compiled(self) -> frozenset[str]:
        found = (
            path.relative_to(self.folder.parent).as_posix()
            for suffix in COMPILED
            for path in self.folder.rglob(f"*{suffix}")
        )
        return frozenset(map(_compiled_name, found))

    def _path(self, module: str) -> Path:
        first, *rest = module.split(".")
        if first != self.package or not all(part.isidentifier() for part in rest):
            return self.folder / "no such module"
        return self.folder.joinpath(*rest)


class _ArchiveTree(SourceTree):
    """Reads a package from an archive, through a mapping from module names to the names of entries."""

    location: Path
    _entries: Mapping[str, str]
    _compiled: frozenset[str]
    _packages: frozenset[str]

    def modules(self) -> Iterable[str]:
        return self._entries.keys()

    def is_package(self, module: str) -> bool:
        return module in self._packages

    def is_compiled(self, module: str) -> bool:
        return module in self._compiled

    def file_of(self, module: str) -> str:
        return self._entries.get(module, module.replace(".", "/") + ".py")

    def read(self, module: str) -> str | None:
        entry = self._entries.get(module)
        if entry is None:
            return None
        return decode_source(self.content(entry), f"{entry} in {self.location.name}")

    @abstractmethod
    def content(self, entry: str) -> bytes:
        """Returns one entry of the archive. Raises SourceError if it is damaged or too large."""

    def _index_entries(self, names: Iterable[str], package: str) -> None:
        """Sorts the entries into modules, packages and compiled extensions. Names are relative to the folder that
        holds the package."""
        entries: dict[str, str] = {}
        compiled = set()
        for name in names:
            if name.split("/", 1)[0] != package:
                continue
            if name.endswith(COMPILED):
                compiled.add(_compiled_name(name))
            elif name.endswith(".py"):
                parts = name.removesuffix(".py").split("/")
                if all(part.isidentifier() for part in parts):
                    entries[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = name
        if package not in entries:
            raise SourceError(f"{self.location} has no Python package {package!r} in it")
        self.package = package
        self._entries = entries
        self._compiled = frozenset(compiled)
        paths = (entry.split("/") for entry in entries.values())
        self._packages = frozenset(".".join(parts[:count]) for parts in paths for count in range(1, len(parts)))


class Wheel:
    """Reads a wheel, or any zip file with the layout of one.

    Each process opens the file for itself: a forked child shares the position in an open file with its parent, and two
    readers would disturb each other.
    """

    def __init__(self, location: Path) -> None:
        self.location = location
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        infos = self._archive().infolist()
        if len(infos) > MAX_ENTRIES:
            raise SourceError(f"{location} is not read: it has {len(infos)} entries, more than {MAX_ENTRIES}")
        safe = [info for info in infos if is_safe_path(info.filename)]
        source = sum(info.file_size for info in safe if info.filename.endswith(".py"))
        if source > MAX_SOURCE_BYTES:
            raise SourceError(f"{location} is not read: it would unpack to {source >> 20} MiB of Python")
        self.names = tuple(info.filename for info in safe)

    def content(self, entry: str) -> bytes:
        """Returns one entry. Raises SourceError if it is damaged or too large."""
        try:
            with self._archive().open(entry) as stream:
                # The size in the archive's directory can be wrong, so it is not relied on.
                content = stream.read(MAX_MODULE_BYTES + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as fault:
            raise SourceError(f"{entry} in {self.location.name} is damaged: {fault}") from fault
        if len(content) > MAX_MODULE_BYTES:
            raise SourceError(
                f"{entry} in {self.location.name} is not read: it has more than {MAX_MODULE_BYTES >> 20} MiB"
            )
        return content

    def metadata(self, file: str) -> str:
        """Returns the text of a file of the wheel's ``.dist-info`` folder, or an empty string."""
        for name in self.names:
            if name.count("/") == 1 and name.endswith(f".dist-info/{file}"):
                return decode_source(self.content(name), name)
        return ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _archive(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = (os.getpid(), zipfile.ZipFile(self.location))
            except (zipfile.BadZipFile, OSError, ValueError) as fault:
                raise SourceError(
                    f"{self.location} is not a wheel that can be read ({fault}); download it again"
                ) from fault
        return self._opened[1]


class WheelTree(_ArchiveTree):
    """Reads a package from a wheel."""

    def __init__(self, location: Path, version: str = "", package: str = "vllm") -> None:
        self.location = location
        self._wheel = Wheel(location)
        self._index_entries(self._wheel.names, package)
        self.version = (
            version
            or _version_in_metadata(self._wheel.metadata("METADATA"))
            or declared_version(self.read(f"{package}._version") or "")
        )
        self.name = f"{package} {self.version or f'in {location.name}'}"

    def content(self, entry: str) -> bytes:
        return self._wheel.content(entry)


class SdistTree(_ArchiveTree):
    """Reads a package from a source archive (``.tar.gz``).

    The modules are kept in memory, compressed, because a tar file has no random access.
    """

    def __init__(self, archive: Path, version: str = "", package: str = "vllm") -> None:
        self.location = archive
        self._contents: dict[str, bytes] = {}
        compiled, metadata = [], ""
        total = 0
        try:
            with tarfile.open(archive, "r:*") as tar:
                for count, member in enumerate(tar):
                    if count > MAX_ENTRIES:
                        raise SourceError(f"{archive} is not read: it has more than {MAX_ENTRIES} entries")
                    # The first folder is NAME-VERSION.
                    name = member.name.partition("/")[2]
                    if not member.isfile() or not is_safe_path(name) or member.size > MAX_MODULE_BYTES:
                        continue
                    if name == "PKG-INFO":
                        metadata = _member(tar, member).decode("utf-8", "replace")
                    elif name.startswith(f"{package}/") and name.endswith(".py"):
                        total += member.size
                        if total > MAX_SOURCE_BYTES:
                            raise SourceError(
                                f"{archive} is not read: it has more than {MAX_SOURCE_BYTES >> 20} MiB of Python"
                            )
                        self._contents[name] = zlib.compress(_member(tar, member), 1)
                    elif name.endswith(COMPILED):
                        compiled.append(name)
        except (tarfile.TarError, EOFError, OSError, zlib.error) as fault:
            raise SourceError(f"{archive} is not an archive that can be read ({fault}); download it again") from fault
        self._index_entries([*self._contents, *compiled], package)
        self.version = (
            version or _version_in_metadata(metadata) or declared_version(self.read(f"{package}._version") or "")
        )
        self.name = f"{package} {self.version or f'in {archive.name}'}"

    def content(self, entry: str) -> bytes:
        return zlib.decompress(self._contents[entry])


def module_texts(tree: SourceTree, unreadable: list[tuple[str, str]] | None = None) -> Iterator[tuple[str, str]]:
    """Yields the name and the source of every module that can be read, and appends the file of each other module and
    the reason to `unreadable`."""
    for module in tree.modules():
        try:
            text = tree.read(module)
        except SourceError as fault:
            if unreadable is not None:
                unreadable.append((tree.file_of(module), str(fault)))
        else:
            if text is not None:
                yield module, text


def decode_source(content: bytes, origin: str) -> str:
    """Returns Python source as text, in the encoding that it declares, else in UTF-8. `origin` names it in errors."""
    if b"\0" in content:
        raise SourceError(f"{origin} contains NUL bytes; it is not Python source")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return io.TextIOWrapper(io.BytesIO(content), encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as fault:
        raise SourceError(f"{origin} is not text in the encoding it declares (UTF-8 if none): {fault}") from fault


def is_safe_path(name: str) -> bool:
    """Returns whether an entry's name stays below the folder that it would be unpacked into."""
    path = PurePosixPath(name)
    return bool(name) and "\\" not in name and not path.is_absolute() and ".." not in path.parts


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    return stream.read(MAX_MODULE_BYTES) if stream is not None else b""


def _compiled_name(path: str) -> str:
    """Returns the module name of a compiled file: ``vllm/_C.abi3.so`` is imported as ``vllm._C``."""
    folder, _, file = path.rpartition("/")
    return f"{folder.replace('/', '.')}.{file.partition('.')[0]}"


def _version_beside(folder: Path, package: str) -> str:
    """Returns the version in the metadata beside the package, which unpacked wheels and source archives have, or an
    empty string."""
    for pattern in (f"{package}*.dist-info/METADATA", "PKG-INFO"):
        for file in sorted(folder.parent.glob(pattern)):
            name = file.parent.name.partition("-")[0] if pattern.endswith("METADATA") else package
            if name == package or name == f"{package}_cpu":
                return _version_in_metadata(file.read_text(encoding="utf-8", errors="replace"))
    return ""


def _version_in_metadata(metadata: str) -> str:
    """Returns the version in the text of a METADATA or PKG-INFO file, or an empty string."""
    for line in metadata.split("\n\n", 1)[0].splitlines():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return ""
