"""Opens the source tree that a user names by a path, by a version or as 'installed'."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream.fetch import Progress, cached_archive, no_progress, source_archive
from vllm_patchbay.upstream.source import FolderTree, SdistTree, SourceTree, WheelTree
from vllm_patchbay.upstream.versions import (
    VERSION_VARIABLE,
    installed_folder,
    installed_version,
    parse_version,
    version_override,
)

logger = logging.getLogger("vllm.vllm_patchbay.upstream")  # vLLM configures handlers for its own logger tree only

INSTALLED = "installed"

_VERSION_AT_PATH = re.compile(r"([0-9][^@/\\]*)@(.+)")


def open_tree(spec: str, progress: Progress = no_progress) -> SourceTree:
    """Returns the source tree that `spec` names.

    A path is that of a wheel, of a source archive, of the package's folder, or of a folder that contains it (a checkout
    or an unpacked wheel). ``installed`` is the vLLM that Python would import. A version is the installed vLLM if it has
    that version, else the published one. ``VERSION@PATH`` is for a tree that does not contain its version.
    """
    versioned = _VERSION_AT_PATH.fullmatch(spec)
    if versioned:
        version = parse_version(versioned[1], f"{spec!r}", "write VERSION@PATH with a version such as 0.32.0")
        return _tree_at(Path(versioned[2]), str(version))
    if spec == INSTALLED:
        return installed_tree()
    path = Path(spec).expanduser()
    if path.exists():
        return _tree_at(path)
    try:
        version = Version(spec)
    except InvalidVersion:
        raise PatchbayError(
            f"{spec!r} is neither a path that exists, nor a version such as 0.32.0, nor '{INSTALLED}'"
        ) from None
    if installed_folder() is not None and installed_version().public == version.public:
        return installed_tree()
    return published_tree(str(version), progress)


def published_tree(version: str, progress: Progress = no_progress) -> SourceTree:
    """Returns the published vLLM of a version, and downloads it if the cache does not have it."""
    return WheelTree(source_archive(Version(version), progress), version)


def cached_tree(version: str) -> SourceTree | None:
    """Returns the published vLLM of a version if the cache has it, else None. It downloads nothing.

    A cache that cannot be trusted is not read, with a warning: the source only makes a difference readable.
    """
    remedy = "name the version that it was taken from, such as 0.32.0"
    parsed = parse_version(version, "a fingerprint", remedy)
    try:
        archive = cached_archive(parsed)
    except PatchbayError as fault:
        logger.warning("The source of vLLM %s is not read from the cache: %s", version, fault)
        return None
    return WheelTree(archive, version) if archive.is_file() else None


def installed_tree() -> SourceTree:
    """Returns the vLLM of this environment, without importing it."""
    version = installed_version()
    folder = installed_folder()
    if folder is None:
        raise PatchbayError(
            "no vLLM is installed in this environment; install one, or name a wheel, a source tree or a version"
        )
    return FolderTree(folder, str(version))


def version_of(tree: SourceTree) -> str:
    """Returns the version that a tree declares, or that of the environment variable if it declares none."""
    if tree.version:
        return str(parse_version(tree.version, tree.name, "write VERSION@PATH with a version such as 0.32.0"))
    override = version_override()
    if override is None:
        raise PatchbayError(
            f"the source tree {tree.name} does not declare its version; write VERSION@PATH, such as 0.32.0@PATH, or "
            f"set {VERSION_VARIABLE}"
        )
    return str(override)


def _tree_at(path: Path, version: str = "") -> SourceTree:
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
