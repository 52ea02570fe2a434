"""Keeps added models in the cache, in a folder per model: a manifest, and the files unless the model is linked.

A folder appears by a rename, when everything in it is complete and written to disk. Work in progress is in a hidden
folder beside it. Both belong to the process that holds the lock of the name. Manifests are read as untrusted data.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm_backplane.added_models.files import digest, is_safe_name, names_in, serving_files, sync_folder
from vllm_backplane.added_models.progress import QUIET, Progress, size_text
from vllm_backplane.errors import BackplaneError, UsageError, nearest, short_repr
from vllm_backplane.models import cache, models

MANIFEST = "manifest.json"
FILES = "files"
VERSION = 1
"""Version of the manifest's form."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_MAX_MANIFEST_BYTES = 16 << 20
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*")


@dataclass(frozen=True, slots=True)
class Format:
    """Describes the format of a model's weights, as its headers state it."""

    kind: str
    """GGUF or safetensors."""
    type: str
    """The quantization type of a GGUF file, or the quantization method or dtype of a safetensors checkpoint."""
    architecture: str

    def __str__(self) -> str:
        return f"{self.kind} {self.type}, {self.architecture}"


@dataclass(frozen=True, slots=True)
class Source:
    """Describes where a model came from."""

    kind: str
    """copy, link or hub."""
    path: str = ""
    """The path that was copied, or the folder of a link's files."""
    repository: str = ""
    selector: str = ""
    """The quantization or the file that was requested of a hub."""
    revision: str = ""
    """The revision that was requested, if any."""
    commit: str = ""
    """The revision that was downloaded."""
    endpoint: str = ""
    """The address of the hub."""

    @property
    def hub_name(self) -> str:
        """Returns the name that the model has on its hub, as it is written on the command line."""
        selector = f":{self.selector}" if self.selector else ""
        return f"{self.repository}{selector}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class File:
    """Describes a file as it was when it was verified."""

    size: int
    sha256: str
    modified: int
    """Modification time in nanoseconds."""


class Fault(NamedTuple):
    """Holds the reason why a model cannot be used as it is."""

    state: Literal["link broken", "changed"]
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes an added model."""

    name: str
    source: Source
    format: Format
    main: str
    """The file that is served, or an empty string if the folder is."""
    files: dict[str, File]

    @property
    def folder(self) -> Path:
        """Returns the folder with the files."""
        return Path(self.source.path) if self.source.kind == "link" else root() / self.name / FILES

    @property
    def path(self) -> Path:
        """Returns the path to serve."""
        return self.folder / self.main if self.main else self.folder

    @property
    def origin(self) -> str:
        """Returns where the model came from, for people."""
        if self.source.kind == "hub":
            return f"hub {self.source.hub_name.partition('@')[0]}@{self.source.commit[:12]}"
        return f"copy of {self.source.path}" if self.source.kind == "copy" else f"link to {self.path}"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def fault(self, *, contents: bool = False, progress: Progress = QUIET) -> Fault | None:
        """Returns what differs from the manifest, if anything does.

        Sizes and modification times are compared, or with `contents` the contents instead of the times.
        """
        linked = self.source.kind == "link"
        for name, expected in self.files.items():
            path = self.folder / name
            try:
                found = path.stat() if linked else path.lstat()
                if not stat.S_ISREG(found.st_mode):
                    return Fault("changed", f"{name} is not a regular file")
                if found.st_size != expected.size:
                    return Fault("changed", f"{name} has {found.st_size} bytes instead of {expected.size}")
                if contents:
                    if digest(path, progress, f"verifying {name}") != expected.sha256:
                        return Fault("changed", f"{name} has changed")
                elif found.st_mtime_ns != expected.modified:
                    return Fault("changed", f"{name} was written to")
            except (FileNotFoundError, NotADirectoryError):
                if linked:
                    return Fault("link broken", f"{path} does not exist")
                return Fault("changed", f"{name} is missing")
            except OSError as fault:
                return Fault("changed", f"{name} cannot be read: {fault.strerror}")
        return self._fault_of_more_files() if linked and not self.main else None

    def _fault_of_more_files(self) -> Fault | None:
        """Returns which file vLLM would read of a linked folder that was not there when it was added."""
        try:
            found = serving_files(names_in(self.folder))
        except OSError as fault:
            return Fault("changed", f"{self.folder} cannot be read: {fault.strerror}")
        more = next((name for name in found if name not in self.files), None)
        return None if more is None else Fault("changed", f"{short_repr(more)} was added to the folder")

    def require_complete(self, progress: Progress = QUIET, *, contents: bool = False) -> None:
        """Raises if the files differ from the manifest. The contents decide where only a modification time differs."""
        fault = self.fault(contents=contents, progress=progress)
        if fault is not None and fault.state == "changed" and not contents:
            fault = self.fault(contents=True, progress=progress)
        if fault is not None:
            raise UsageError(f"the model {self.name}: {fault.text}; {self.remedy}")

    @property
    def remedy(self) -> str:
        """Returns what to do if files are damaged or missing."""
        origin = self.source.hub_name if self.source.kind == "hub" else self.source.path
        if self.source.kind == "link" and self.main:
            origin = str(self.path)
        link = " --link" if self.source.kind == "link" else ""
        return (
            f"run 'vllm-backplane model add {shlex.quote(origin)} --name {self.name}{link} --replace', or "
            f"'vllm-backplane model remove {self.name}'"
        )


def root() -> Path:
    """Returns the folder of all added models, which may not exist yet."""
    return cache.cache_folder() / "added"


def names() -> list[str]:
    """Returns the names of the added models."""
    folder = root()
    if not _is_own_folder(folder):
        return []
    try:
        return sorted(one.name for one in os.scandir(folder) if is_name(one.name) and one.is_dir(follow_symlinks=False))
    except OSError as fault:
        raise _not_usable(folder, fault) from fault


def unfinished() -> list[str]:
    """Returns the names of models that are being added, replaced or removed, or where that was interrupted."""
    folder = root()
    if not _is_own_folder(folder):
        return []
    found = (one.name for one in os.scandir(folder) if one.is_dir(follow_symlinks=False))
    hidden = (name[1:].rpartition(".") for name in found if name.startswith("."))
    return sorted({name for name, _, work in hidden if work in ("partial", "replaced", "removed") and is_name(name)})


def lookup(given: str) -> Entry | None:
    """Returns the added model of a name, which may also be its name on a hub, or None if there is no such model."""
    if is_name(given):
        return read(given) if given in names() else None
    if "/" not in given or Path(given).exists():
        return None
    for name in names():
        try:
            entry = read(name)
        except BackplaneError:
            continue  # a manifest that cannot be read is an error for those who use that name
        if entry.source.kind == "hub" and entry.source.hub_name.lower() == given.lower():
            return entry
    return None


def find(given: str) -> Entry:
    """Returns the added model of a name. Raises if there is none."""
    entry = lookup(given)
    if entry is None:
        known = [model.name for model in models()] + names()
        raise UsageError(
            f"no model {short_repr(given)}{nearest(given, known)} There are: {', '.join(known)}. To add one, run: "
            "vllm-backplane model add PATH or USER/REPOSITORY:QUANTIZATION"
        )
    return entry


def is_name(text: str) -> bool:
    """Returns whether an added model may have this name."""
    return _NAME.fullmatch(text) is not None


def require_name(name: str) -> None:
    """Raises if a model cannot be added under this name."""
    if not is_name(name):
        raise UsageError(
            f"a model cannot be named {short_repr(name)}; run 'vllm-backplane model add' with --name and at most 96 "
            "letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    if name in {model.name for model in models()}:
        raise UsageError(f"{name} is a bundled model; give the added one another name with --name")


def require_free(name: str) -> None:
    """Raises if there is a model of this name."""
    if name in names():
        raise UsageError(
            f"there is an added model {name} already; run 'vllm-backplane model add' with --name for another name, or "
            "with --replace"
        )


def require_recordable(path: Path, names: Iterable[str]) -> None:
    """Raises if a manifest cannot have the path of a model, or the names of its files."""
    for name in names:
        if not is_safe_name(name):
            raise UsageError(
                f"the file {short_repr(name)} cannot be added; rename it: printable characters, no backslash, at most "
                "200 bytes"
            )
    if not _PRINTABLE.fullmatch(str(path)):
        raise UsageError(f"the path {str(path)!r} has characters that cannot be printed; rename the folder")


@contextmanager
def locked(name: str, progress: Progress) -> Iterator[None]:
    """Holds the lock of a name, and creates the folder of all added models if needed."""
    folder = root()
    try:
        cache.create(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as fault:
        raise _not_usable(folder, fault) from fault
    _is_own_folder(folder)
    waiting = f"waiting for another process that adds or removes {name}"
    with cache.exclusive(folder / f".{name}.lock", progress.report, waiting):
        _settle(name)
        yield


def staging(name: str) -> Path:
    """Returns the folder of an addition in progress. Only the holder of the lock may touch it."""
    return root() / f".{name}.partial"


def discard(name: str) -> None:
    """Removes what an interrupted addition left. The caller holds the lock of the name."""
    _remove_tree(staging(name))


def publish(entry: Entry) -> None:
    """Makes the staged files, or a link, the model of its name, in place of one that has the name.

    The caller holds the lock of the name.
    """
    staged, final = staging(entry.name), root() / entry.name
    manifest = {"version": VERSION, **asdict(entry)}
    del manifest["name"]
    try:
        _parsed(entry.name, manifest)
    except ValueError as fault:
        raise BackplaneError(f"the model {entry.name} cannot be recorded: {fault}; rename what has that name") from None
    with open(staged / MANIFEST, "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(json.dumps(manifest, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(staged)
    try:
        if final.exists():
            final.rename(_replaced(entry.name))
        staged.rename(final)
    finally:
        _settle(entry.name)
    sync_folder(final.parent)


def remove(name: str) -> None:
    """Removes a model, or what an interrupted addition left. The caller holds the lock of the name."""
    final = root() / name
    if final.exists():
        final.rename(_trash(name))
    _remove_tree(_trash(name))
    discard(name)


def read(name: str) -> Entry:
    """Reads the manifest of a model. Raises if it does not have the form that `publish` writes."""
    try:
        with open(root() / name / MANIFEST, "rb") as stream:
            raw = stream.read(_MAX_MANIFEST_BYTES + 1)
        if len(raw) > _MAX_MANIFEST_BYTES:
            raise ValueError("it is too large")
        return _parsed(name, json.loads(raw))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise BackplaneError(
            f"the manifest of the added model {name} cannot be read ({type(fault).__name__}: {fault}); run "
            f"'vllm-backplane model remove {name}' and add the model again"
        ) from None


def _parsed(name: str, found: Any) -> Entry:
    if found["version"] != VERSION:
        raise ValueError(f"it has version {short_repr(found['version'])}")
    source = Source(**{key: _text(value) for key, value in found["source"].items()})
    if source.kind not in ("copy", "link", "hub") or (source.kind == "link" and not os.path.isabs(source.path)):
        raise ValueError(f"its source is {short_repr(found['source'])}")
    entry = Entry(
        name,
        source,
        Format(**{key: _text(value) for key, value in found["format"].items()}),
        _text(found["main"]),
        {_file_name(key): _file(value) for key, value in found["files"].items()},
    )
    if not entry.files or (entry.main and entry.main not in entry.files):
        raise ValueError("it does not list the files")
    return entry


def _text(value: Any) -> str:
    if not isinstance(value, str) or not _PRINTABLE.fullmatch(value):
        raise ValueError(f"it has {short_repr(value)} where a text belongs")
    return value


def _file_name(name: str) -> str:
    if not is_safe_name(name):
        raise ValueError(f"it names the file {short_repr(name)}")
    return name


def _file(found: Any) -> File:
    file = File(found["size"], _text(found["sha256"]), found["modified"])
    if type(file.size) is not int or file.size < 0 or type(file.modified) is not int:
        raise ValueError(f"it describes a file by {short_repr(found)}")
    return file


def _trash(name: str) -> Path:
    return root() / f".{name}.removed"


def _replaced(name: str) -> Path:
    """Returns where a model is while another takes its place. It is complete as long as there is no model `name`."""
    return root() / f".{name}.replaced"


def _settle(name: str) -> None:
    """Ends a replacement or a removal, also one that was interrupted. The caller holds the lock of the name."""
    if _replaced(name).exists() and not (root() / name).exists():
        _replaced(name).rename(root() / name)
    _remove_tree(_replaced(name))
    _remove_tree(_trash(name))


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as fault:
        raise BackplaneError(f"cannot remove {folder}: {fault.strerror}; remove it yourself") from fault


def _is_own_folder(folder: Path) -> bool:
    """Returns whether the folder exists. Raises if it is a link, or if another user can change files in it."""
    try:
        found = folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as fault:
        raise _not_usable(folder, fault) from fault
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise BackplaneError(
            f"{folder} is not a folder that only you can write to, so that the models in it cannot be trusted; remove "
            "it, or set BACKPLANE_CACHE to a folder of your own"
        )
    return True


def _not_usable(folder: Path, fault: OSError) -> BackplaneError:
    return BackplaneError(f"{folder} cannot be used: {fault.strerror}; set BACKPLANE_CACHE to a folder of your own")


def require_space(needed: int, what: str) -> None:
    """Raises if the file system of the cache has fewer free bytes than `needed`."""
    folder = root()
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise _no_space(f"{what} needs {size_text(needed)} more, and {size_text(free)} are free")


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turns errors of writing into the cache, and of reading other files, into errors that name the remedy."""
    try:
        yield
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(root()).free
            raise _no_space(f"the disk became full while {what} was written; {size_text(free)} are free") from fault
        if isinstance(fault.filename, str) and not Path(fault.filename).is_relative_to(root()):
            raise BackplaneError(
                f"{fault.filename} cannot be read: {fault.strerror}; check its permissions and its disk"
            ) from fault
        raise BackplaneError(
            f"cannot write {what} into {root()}: {fault}; set BACKPLANE_CACHE to a writable folder"
        ) from fault


def _no_space(what: str) -> BackplaneError:
    return BackplaneError(
        f"not enough space in {root()}: {what}; free some space, or set BACKPLANE_CACHE to a folder on another disk"
    )
