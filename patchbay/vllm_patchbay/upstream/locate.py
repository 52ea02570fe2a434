"""From what a person writes (a path, a version, 'installed') to a source tree."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream.fetch import Progress, kept_archive, silent, source_archive
from vllm_patchbay.upstream.source import FolderTree, SdistTree, SourceTree, WheelTree
from vllm_patchbay.upstream.versions import (
    VERSION_VARIABLE,
    installed_folder,
    installed_version,
    parsed,
    version_of_variable,
)

INSTALLED = "installed"

_STATED = re.compile(r"([0-9][^@/\\]*)@(.+)")


def open_tree(spec: str, progress: Progress = silent) -> SourceTree:
    """The source tree that `spec` names.

    A path: a wheel, a source archive, the folder of the package, or a folder that has it in it (a checkout, an unpacked
    wheel). ``installed``: what Python would import. A version: the installed vLLM if it has that version, else the
    published one. ``VERSION@PATH``: a tree that does not say its version itself.
    """
    stated = _STATED.fullmatch(spec)
    if stated:
        version = parsed(stated[1], f"{spec!r}", "write VERSION@PATH with a version such as 0.32.0")
        return _at(Path(stated[2]), str(version))
    if spec == INSTALLED:
        return installed_tree()
    path = Path(spec).expanduser()
    if path.exists():
        return _at(path)
    try:
        version = Version(spec)
    except InvalidVersion:
        raise PatchbayError(
            f"{spec!r} is neither a path that exists, nor a version such as 0.32.0, nor '{INSTALLED}'"
        ) from None
    if installed_folder() is not None and installed_version().public == version.public:
        return installed_tree()
    return published_tree(str(version), progress)


def published_tree(version: str, progress: Progress = silent) -> SourceTree:
    """The vLLM of that version as it was published, fetched if it has not been before."""
    return WheelTree(source_archive(Version(version), progress), version)


def kept_tree(version: str) -> SourceTree | None:
    """The published vLLM of a version, if it has been fetched before; nothing is downloaded."""
    archive = kept_archive(parsed(version, "a fingerprint", "name the version that it was taken of, such as 0.32.0"))
    return WheelTree(archive, version) if archive.is_file() else None


def installed_tree() -> SourceTree:
    """The vLLM of this environment, found without importing it."""
    version = installed_version()
    folder = installed_folder()
    if folder is None:
        raise PatchbayError(
            "no vLLM is installed in this environment; install one, or name a wheel, a source tree or a version"
        )
    return FolderTree(folder, str(version))


def version_of(tree: SourceTree) -> str:
    """What a tree says it is; for one that says nothing, what the variable says."""
    if tree.version:
        return str(parsed(tree.version, tree.name, "write VERSION@PATH with a version such as 0.32.0"))
    stated = version_of_variable()
    if stated is None:
        raise PatchbayError(
            f"the source tree {tree.name} does not say which version it is; write VERSION@PATH, such as 0.32.0@PATH, "
            f"or set {VERSION_VARIABLE}"
        )
    return str(stated)


def _at(path: Path, version: str = "") -> SourceTree:
    if not path.exists():
        raise PatchbayError(f"{path} does not exist; give the path of a wheel or of a source tree")
    if path.is_dir():
        for folder in (path, path / "vllm", path / "src" / "vllm"):
            if folder.name == "vllm" and (folder / "__init__.py").is_file():
                return FolderTree(folder.absolute(), version)
        raise PatchbayError(f"{path} has no package vllm in it; give the folder that contains 'vllm/__init__.py'")
    if path.name.endswith((".tar.gz", ".tgz", ".tar")):
        return SdistTree(path.absolute(), version)
    return WheelTree(path.absolute(), version)
