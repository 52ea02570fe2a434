"""Finds what there is to audit: the Python files of a folder, of a wheel, or one file by itself.

Tests and vendored folders belong to a plugin and are audited. Left out is what does not: hidden folders, caches,
environments, and what a build left next to the source.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_patchbay.audit.entry_points import EntryPoint, from_metadata, from_project
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.plugin import Plugin, PluginFile, PluginTree
from vllm_patchbay.audit.rules import RULES
from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream.source import Wheel

_PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")
_MOST_FILES = 100_000


@dataclass(slots=True)
class Collection:
    root: Path
    plugin: Plugin
    wheel: Wheel | None = None
    entry_points: list[EntryPoint] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """About files that could not even be looked at."""


def collect(path: Path, exclude: Sequence[str] = ()) -> Collection:
    if not path.exists():
        raise PatchbayError(f"{path} does not exist; give the folder, wheel or file of a plugin")
    if path.is_dir():
        return _folder(path, exclude)
    if path.suffix == ".py":
        file = PluginFile(path.name, _module_of(path, path.parent)[0], path.name == "__init__.py", path)
        return Collection(path.parent, _plugin([file], None))
    if path.suffix not in (".whl", ".zip"):
        raise PatchbayError(f"{path} is neither a folder, nor a wheel (.whl), nor a Python file (.py)")
    return _wheel(path, exclude)


def _plugin(files: list[PluginFile], wheel: Wheel | None) -> Plugin:
    packages = frozenset(file.module.partition(".")[0] for file in files) - {"vllm", ""}
    return Plugin(tuple(files), PluginTree(files, wheel), packages)


def _folder(root: Path, exclude: Sequence[str]) -> Collection:
    problems: list[Finding] = []
    files, projects = [], []
    for path in _walk(root, exclude, problems):
        name = path.relative_to(root).as_posix()
        if path.name in _PROJECT_FILES:
            projects.append(path)
        if path.suffix == ".py":
            module, is_package = _module_of(path, root)
            files.append(PluginFile(name, module, is_package, path))
        if len(files) > _MOST_FILES:
            raise PatchbayError(
                f"{root} has more than {_MOST_FILES} Python files; audit a part of it, or --exclude some"
            )
    if not files and not problems:
        left = ", or --exclude leaves none" if exclude else ""
        raise PatchbayError(f"{root} has no Python files to audit{left}; give the folder of a plugin")
    collection = Collection(root, _plugin(files, None), findings=problems)
    for project in projects:
        found, faults = from_project(project, project.relative_to(root).as_posix())
        collection.entry_points += found
        collection.findings += faults
    return collection


def _wheel(path: Path, exclude: Sequence[str]) -> Collection:
    wheel = Wheel(path)
    files = []
    for name in sorted(wheel.names):
        if name.endswith(".py") and ".data/" not in name and not _excluded(name, exclude):
            parts = name.removesuffix(".py").split("/")
            is_package = parts[-1] == "__init__"
            if all(part.isidentifier() for part in parts):
                files.append(PluginFile(name, ".".join(parts[:-1] if is_package else parts), is_package, None))
    if not files:
        raise PatchbayError(f"{path} has no Python files in it")
    entry_points = from_metadata(wheel.metadata("entry_points.txt"), "entry_points.txt")
    return Collection(path, _plugin(files, wheel), wheel, entry_points)


def _walk(root: Path, exclude: Sequence[str], problems: list[Finding]) -> Iterator[Path]:
    """Files below `root`, links to folders included, each folder once, however links lead to it."""
    seen: set[tuple[int, int]] = set()
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as fault:
            problems.append(unreadable(folder.relative_to(root).as_posix(), f"it cannot be read: {fault.strerror}"))
            continue
        names = {entry.name for entry in entries}
        below = []
        for entry in entries:
            path = folder / entry.name
            if _excluded(path.relative_to(root).as_posix(), exclude):
                continue
            if _is_folder(entry):
                if not _left_out(path, names):
                    below.append(path)
            elif entry.name.endswith(".py") or entry.name in _PROJECT_FILES:
                yield path
        pending += reversed(below)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _left_out(folder: Path, siblings: set[str]) -> bool:
    name = folder.name
    if name.startswith(".") or name in ("__pycache__", "node_modules") or name.endswith(".egg-info"):
        return True
    if (folder / "pyvenv.cfg").exists():
        return True
    is_project = bool(siblings & set(_PROJECT_FILES))
    return is_project and name in ("build", "dist") and not (folder / "__init__.py").exists()


def _excluded(name: str, patterns: Sequence[str]) -> bool:
    """A pattern matches a path, any folder on the way to it, or the last part of it."""
    parts = name.split("/")
    return any(
        fnmatch.fnmatchcase("/".join(parts[:count]), pattern) or fnmatch.fnmatchcase(parts[count - 1], pattern)
        for pattern in (pattern.rstrip("/") for pattern in patterns)
        for count in range(1, len(parts) + 1)
    )


def _module_of(path: Path, root: Path) -> tuple[str, bool]:
    """The name under which the file would be imported: from the outermost folder with an ``__init__.py`` on."""
    top = None
    folder = path.parent
    while True:
        if (folder / "__init__.py").exists():
            top = folder
        elif not folder.is_relative_to(root) or folder == root:
            break
        if folder.parent == folder:
            break
        folder = folder.parent
    is_package = path.name == "__init__.py"
    names = [] if is_package else [path.stem]
    if top is None:
        return ".".join(names) or path.parent.name, is_package
    return ".".join([top.name, *path.parent.relative_to(top).parts, *names]), is_package


def unreadable(file: str, why: str, line: int = 0) -> Finding:
    rule = RULES["BP902"]
    return Finding(rule.id, rule.severity, file, line, 1 if line else 0, why, remedy=rule.remedy)
