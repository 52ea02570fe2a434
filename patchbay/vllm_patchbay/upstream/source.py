"""A package's Python source, read without importing it: from a folder, from a wheel, from a source archive.

Archives are read in place. Nothing in them is believed: an entry is used only if its name is a plain relative path, and
only up to a size that no honest module has.
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
from vllm_patchbay.upstream.versions import stated_version, version_in

LARGEST_MODULE = 16 * 2**20
"""Bytes. vLLM's largest module has about 0.3 MiB."""

MOST_SOURCE = 1024 * 2**20
"""Bytes of all modules of an archive together."""

MOST_ENTRIES = 200_000

COMPILED = (".so", ".pyd")


class SourceError(PatchbayError):
    """A source tree, or one file of it, cannot be read."""


class SourceTree(ABC):
    """The Python modules of one version of a package, by dotted name."""

    name: str
    """What to call it in a report, such as ``vllm 0.32.0``."""

    version: str
    """Empty if the tree does not say."""

    package: str

    @abstractmethod
    def modules(self) -> Iterable[str]:
        """Names of all modules that have Python source, packages included."""

    @abstractmethod
    def read(self, module: str) -> str | None:
        """The source of a module, or None if it has none. SourceError if it is there and cannot be read."""

    @abstractmethod
    def is_package(self, module: str) -> bool:
        """Whether the module can have modules below it. A folder without ``__init__.py`` is one too."""

    @abstractmethod
    def is_compiled(self, module: str) -> bool:
        """Whether the module is there as machine code, so that nothing can be said about its content."""

    @abstractmethod
    def file_of(self, module: str) -> str:
        """The path of the module's file within the tree, for people to read."""

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What was worked out from the source, kept with it so that it is worked out once. Not sent to other
        processes."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "derived"}

    def has(self, module: str) -> bool:
        return module in self.module_names or self.is_package(module) or self.is_compiled(module)

    @cached_property
    def module_names(self) -> frozenset[str]:
        return frozenset(self.modules())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class FolderTree(SourceTree):
    """`folder` is the package itself: it has the ``__init__.py``."""

    def __init__(self, folder: Path, version: str = "", package: str = "vllm") -> None:
        self.folder = folder
        self.package = package
        self.version = version or version_in(folder) or _version_of_neighbour(folder, package)
        self.name = f"{package} {self.version or f'in {folder}'}"

    def modules(self) -> Iterator[str]:
        # Links are not followed: a loop would never end, and a package has no need of them.
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
                if candidate.stat().st_size > LARGEST_MODULE:
                    raise SourceError(f"{candidate} has more than {LARGEST_MODULE >> 20} MiB; it is not read")
                try:
                    return decoded(candidate.read_bytes(), str(candidate))
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
    """Over a mapping from module to the name of its entry."""

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
        return decoded(self.content(entry), f"{entry} in {self.location.name}")

    @abstractmethod
    def content(self, entry: str) -> bytes:
        """One entry of the archive. SourceError if it is damaged or too large."""

    def _arrange(self, names: Iterable[str], package: str) -> None:
        """Sort entries, given as paths below the folder that holds the package."""
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
    """A wheel, or any zip file laid out like one. Opened once per process: a position in an open file is shared with
    children, and two readers would disturb each other."""

    def __init__(self, location: Path) -> None:
        self.location = location
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        infos = self._archive().infolist()
        if len(infos) > MOST_ENTRIES:
            raise SourceError(f"{location} has {len(infos)} entries; more than {MOST_ENTRIES} are not read")
        plain = [info for info in infos if is_plain(info.filename)]
        source = sum(info.file_size for info in plain if info.filename.endswith(".py"))
        if source > MOST_SOURCE:
            raise SourceError(f"{location} would unpack to {source >> 20} MiB of Python; it is not read")
        self.names = tuple(info.filename for info in plain)

    def content(self, entry: str) -> bytes:
        """One entry. SourceError if it is damaged or too large."""
        try:
            with self._archive().open(entry) as stream:
                # What the directory says of a size need not be so.
                content = stream.read(LARGEST_MODULE + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as fault:
            raise SourceError(f"{entry} in {self.location.name} is damaged: {fault}") from fault
        if len(content) > LARGEST_MODULE:
            raise SourceError(f"{entry} in {self.location.name} has more than {LARGEST_MODULE >> 20} MiB; not read")
        return content

    def metadata(self, file: str) -> str:
        """The text of a file of the wheel's ``.dist-info`` folder, or an empty string."""
        for name in self.names:
            if name.count("/") == 1 and name.endswith(f".dist-info/{file}"):
                return decoded(self.content(name), name)
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
    def __init__(self, location: Path, version: str = "", package: str = "vllm") -> None:
        self.location = location
        self._wheel = Wheel(location)
        self._arrange(self._wheel.names, package)
        self.version = (
            version
            or _version_in_metadata(self._wheel.metadata("METADATA"))
            or stated_version(self.read(f"{package}._version") or "")
        )
        self.name = f"{package} {self.version or f'in {location.name}'}"

    def content(self, entry: str) -> bytes:
        return self._wheel.content(entry)


class SdistTree(_ArchiveTree):
    """A ``.tar.gz``. It cannot be read at random, so the modules are kept, compressed, in memory."""

    def __init__(self, archive: Path, version: str = "", package: str = "vllm") -> None:
        self.location = archive
        self._contents: dict[str, bytes] = {}
        compiled, metadata = [], ""
        total = 0
        try:
            with tarfile.open(archive, "r:*") as tar:
                for count, member in enumerate(tar):
                    if count > MOST_ENTRIES:
                        raise SourceError(f"{archive} has more than {MOST_ENTRIES} entries; it is not read")
                    # The first folder is NAME-VERSION.
                    name = member.name.partition("/")[2]
                    if not member.isfile() or not is_plain(name) or member.size > LARGEST_MODULE:
                        continue
                    if name == "PKG-INFO":
                        metadata = _member(tar, member).decode("utf-8", "replace")
                    elif name.startswith(f"{package}/") and name.endswith(".py"):
                        total += member.size
                        if total > MOST_SOURCE:
                            raise SourceError(f"{archive} has more than {MOST_SOURCE >> 20} MiB of Python")
                        self._contents[name] = zlib.compress(_member(tar, member), 1)
                    elif name.endswith(COMPILED):
                        compiled.append(name)
        except (tarfile.TarError, EOFError, OSError, zlib.error) as fault:
            raise SourceError(f"{archive} is not an archive that can be read ({fault}); download it again") from fault
        self._arrange([*self._contents, *compiled], package)
        self.version = (
            version or _version_in_metadata(metadata) or stated_version(self.read(f"{package}._version") or "")
        )
        self.name = f"{package} {self.version or f'in {archive.name}'}"

    def content(self, entry: str) -> bytes:
        return zlib.decompress(self._contents[entry])


def decoded(content: bytes, origin: str) -> str:
    """Python source as text, by the rules for Python source: a declared encoding, else UTF-8."""
    if b"\0" in content:
        raise SourceError(f"{origin} contains NUL bytes; it is not Python source")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return io.TextIOWrapper(io.BytesIO(content), encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as fault:
        raise SourceError(f"{origin} is not text in the encoding it declares (UTF-8 if none): {fault}") from fault


def is_plain(name: str) -> bool:
    """Whether an entry's name stays below the folder it would be unpacked into."""
    path = PurePosixPath(name)
    return bool(name) and "\\" not in name and not path.is_absolute() and ".." not in path.parts


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    return stream.read(LARGEST_MODULE) if stream is not None else b""


def _compiled_name(path: str) -> str:
    """``vllm/_C.abi3.so`` is imported as ``vllm._C``."""
    folder, _, file = path.rpartition("/")
    return f"{folder.replace('/', '.')}.{file.partition('.')[0]}"


def _version_of_neighbour(folder: Path, package: str) -> str:
    """From metadata next to the package, as an unpacked wheel and an unpacked source archive have it."""
    for pattern in (f"{package}*.dist-info/METADATA", "PKG-INFO"):
        for file in sorted(folder.parent.glob(pattern)):
            name = file.parent.name.partition("-")[0] if pattern.endswith("METADATA") else package
            if name == package or name == f"{package}_cpu":
                return _version_in_metadata(file.read_text(encoding="utf-8", errors="replace"))
    return ""


def _version_in_metadata(metadata: str) -> str:
    for line in metadata.split("\n\n", 1)[0].splitlines():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return ""
