"""Collects the files to audit: the Python files of a folder or a wheel, or a single file.

Tests and vendored folders belong to a plugin and are audited. Hidden folders, caches, virtual environments, and build
results next to a project file are not.
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
_MAX_FILES = 100_000


@dataclass(slots=True)
class CollectedPlugin:
    """Holds a plugin's files and entry points, before its files are read."""

    root: Path
    plugin: Plugin
    wheel: Wheel | None = None
    entry_points: list[EntryPoint] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Findings about folders and project files that could not be read."""


def collect(path: Path, exclude: Sequence[str] = ()) -> CollectedPlugin:
    """Returns the plugin at a path, without files that match a pattern of `exclude`.

    Raises PatchbayError if there is nothing to audit.
    """
    if not path.exists():
        raise PatchbayError(f"{path} does not exist; give the folder, wheel or Python file of a plugin")
    if path.is_dir():
        return _folder(path, exclude)
    if path.suffix == ".py":
        file = PluginFile(path.name, _module_of(path, path.parent)[0], path.name == "__init__.py", path)
        return CollectedPlugin(path.parent, _plugin([file], None))
    if path.suffix not in (".whl", ".zip"):
        raise PatchbayError(
            f"{path} is neither a folder, nor a wheel (.whl), nor a Python file (.py); give one of these"
        )
    return _wheel(path, exclude)


def _plugin(files: list[PluginFile], wheel: Wheel | None) -> Plugin:
    packages = frozenset(file.module.partition(".")[0] for file in files) - {"vllm", ""}
    return Plugin(tuple(files), PluginTree(files, wheel), packages)


def _folder(root: Path, exclude: Sequence[str]) -> CollectedPlugin:
    problems: list[Finding] = []
    files, projects = [], []
    for path in _walk(root, exclude, problems):
        name = path.relative_to(root).as_posix()
        if path.name in _PROJECT_FILES:
            projects.append(path)
        if path.suffix == ".py":
            module, is_package = _module_of(path, root)
            files.append(PluginFile(name, module, is_package, path))
        if len(files) > _MAX_FILES:
            raise PatchbayError(
                f"{root} has more than {_MAX_FILES} Python files; audit a part of it, or leave some out with --exclude"
            )
    if not files and not problems:
        left = ", or --exclude leaves out all of them" if exclude else ""
        raise PatchbayError(f"{root} has no Python files to audit{left}; give the folder of a plugin")
    collection = CollectedPlugin(root, _plugin(files, None), findings=problems)
    for project in projects:
        found, faults = from_project(project, project.relative_to(root).as_posix())
        collection.entry_points += found
        collection.findings += faults
    return collection


def _wheel(path: Path, exclude: Sequence[str]) -> CollectedPlugin:
    wheel = Wheel(path)
    files = []
    for name in sorted(wheel.names):
        if name.endswith(".py") and ".data/" not in name and not _is_excluded(name, exclude):
            parts = name.removesuffix(".py").split("/")
            is_package = parts[-1] == "__init__"
            if all(part.isidentifier() for part in parts):
                files.append(PluginFile(name, ".".join(parts[:-1] if is_package else parts), is_package, None))
    if not files:
        raise PatchbayError(f"{path} contains no Python files to audit; give the wheel of a plugin")
    entry_points = from_metadata(wheel.metadata("entry_points.txt"), "entry_points.txt")
    return CollectedPlugin(path, _plugin(files, wheel), wheel, entry_points)


def _walk(root: Path, exclude: Sequence[str], problems: list[Finding]) -> Iterator[Path]:
    """Yields the files below `root`. Links to folders are followed, and each folder is visited once."""
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
            problems.append(
                unreadable_finding(folder.relative_to(root).as_posix(), f"it cannot be read: {fault.strerror}")
            )
            continue
        names = {entry.name for entry in entries}
        below = []
        for entry in entries:
            path = folder / entry.name
            if _is_excluded(path.relative_to(root).as_posix(), exclude):
                continue
            if _is_folder(entry):
                if not _is_ignored(path, names):
                    below.append(path)
            elif entry.name.endswith(".py") or entry.name in _PROJECT_FILES:
                yield path
        pending += reversed(below)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_ignored(folder: Path, siblings: set[str]) -> bool:
    """Returns whether a folder is not part of the plugin's source."""
    name = folder.name
    if name.startswith(".") or name in ("__pycache__", "node_modules") or name.endswith(".egg-info"):
        return True
    if (folder / "pyvenv.cfg").exists():
        return True
    is_project = bool(siblings & set(_PROJECT_FILES))
    return is_project and name in ("build", "dist") and not (folder / "__init__.py").exists()


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern matches the path, a folder that it is in, or the name of either."""
    parts = name.split("/")
    return any(
        fnmatch.fnmatchcase("/".join(parts[:count]), pattern) or fnmatch.fnmatchcase(parts[count - 1], pattern)
        for pattern in (pattern.rstrip("/") for pattern in patterns)
        for count in range(1, len(parts) + 1)
    )


def _module_of(path: Path, root: Path) -> tuple[str, bool]:
    """Returns the dotted name under which the file would be imported, and whether it is a package.

    The name starts at the outermost folder that has an ``__init__.py``.
    """
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


def unreadable_finding(file: str, why: str, line: int = 0) -> Finding:
    """Returns the finding about a file that was not audited."""
    rule = RULES["BP902"]
    return Finding(rule.id, rule.severity, file, line, 1 if line else 0, why, remedy=rule.remedy)
