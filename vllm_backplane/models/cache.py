"""Prepared models on disk: made once, whole or not at all, whoever asks first.

A prepared folder appears by a rename and carries a manifest of its files, so an interrupted preparation
leaves nothing that looks finished, and a damaged one is noticed and made again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from vllm_backplane.errors import BackplaneError
from vllm_backplane.models.bundled import MIB, BundledModel, find
from vllm_backplane.models.package import fetch, installed_content, sha256

MANIFEST = "backplane-manifest.json"


def cache_folder() -> Path:
    """$BACKPLANE_CACHE, else vllm-backplane in the user's cache folder: for what a command of ours was told to get."""
    if (own := _stated_folder()) is not None:
        return own
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules: a relative path there is to be ignored.
    base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    return base / "vllm-backplane"


def derived_folder() -> Path:
    """$BACKPLANE_CACHE, else a folder of the user's own among temporary files: for what vLLM makes of the user's files
    with Backplane as its plugin, which writes nothing to anybody's home unless it is told to.

    What is read from there is believed. Everyone may write beside it, so it has to be the user's, and closed to others.
    """
    if (own := _stated_folder()) is not None:
        return own
    folder = Path(tempfile.gettempdir(), f"vllm-backplane-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # of a link, not of what it leads to
    except OSError as fault:
        raise BackplaneError(
            f"cannot make {folder}: {fault}; set BACKPLANE_CACHE to a folder that can be written to"
        ) from fault
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BackplaneError(
            f"{folder} is not a folder that you alone can write to and read; remove it, or set BACKPLANE_CACHE to "
            "another one"
        )
    return folder


def _stated_folder() -> Path | None:
    own = os.environ.get("BACKPLANE_CACHE")
    return Path(own).expanduser().absolute() if own else None


def prepared_folder(model: BundledModel) -> Path:
    """Where the model is, or will be. The name changes with everything that decides its content."""
    return cache_folder() / "models" / f"{model.name}-{model.version}-{model.recipe}"


def packaged(model: BundledModel) -> Path | None:
    """The model's file in the package that is installed, for a model that is served from there."""
    return installed_content(model.package, model.version, model.content) if model.in_place else None


def damage(folder: Path, *, hashes: bool = False) -> str:
    """Why `folder` is not a complete prepared model, or an empty string if it is. Sizes are compared always,
    contents with `hashes`."""
    if not folder.is_dir():
        return "not prepared"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return "it has no manifest"
    except (ValueError, KeyError, TypeError):
        return "its manifest cannot be read"
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
        if hashes and sha256(file) != expected["sha256"]:
            return f"{name} has changed"
    return ""


def obtain(name: str, progress: Callable[[str], None] = lambda _message: None, *, verify: bool = False) -> Path:
    """The folder of a bundled model, prepared if it is not, or its file in the package that is installed. `verify`
    compares contents, not sizes alone."""
    model = find(name)
    installed = packaged(model)
    if installed is not None:
        if verify:
            _check_digests(model, installed)
        return installed
    folder = prepared_folder(model)
    if not damage(folder, hashes=verify):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder.parent / f".{model.name}.lock", progress):
            # Another process may have done it while this one waited.
            fault = damage(folder, hashes=verify)
            if fault:
                if folder.exists():
                    progress(f"preparing {model.name} again: {fault}")
                _prepare(model, folder, progress)
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(model, folder.parent) from fault
        raise BackplaneError(
            f"cannot prepare {model.name} in {folder.parent}: {fault}; set BACKPLANE_CACHE to a folder that "
            "can be written to"
        ) from fault
    return folder


def _prepare(model: BundledModel, folder: Path, progress: Callable[[str], None]) -> None:
    # The lock is held, so partial folders of this model belong to processes that are gone.
    for leftover in folder.parent.glob(f".{model.name}-*.partial"):
        shutil.rmtree(leftover)
    missing = [library for library in model.libraries if find_spec(library) is None]
    if missing:
        raise BackplaneError(f"preparing {model.name} needs {', '.join(missing)}; run: pip install {' '.join(missing)}")
    if shutil.disk_usage(folder.parent).free < model.disk_needed:
        raise _disk_full(model, folder.parent)
    # In the same folder as the result: a rename is atomic only within a file system.
    with tempfile.TemporaryDirectory(".partial", f".{model.name}-", folder.parent) as scratch:
        package, result = Path(scratch, "package"), Path(scratch, "result")
        package.mkdir()
        result.mkdir()
        content = fetch(model.package, model.version, model.content, package, progress)
        _check_digests(model, content)
        model.prepare(content, result, progress)
        progress("writing the manifest")
        _write_manifest(model, result)
        if folder.exists():
            folder.rename(Path(scratch, "damaged"))
        result.rename(folder)
    progress(f"{model.name} is ready in {folder}")


def _check_digests(model: BundledModel, content: Path) -> None:
    root = Path(str(content).removesuffix(model.content.rstrip("/")))
    for name, expected in model.digests:
        found = sha256(root / name)
        if found != expected:
            raise BackplaneError(
                f"{name} of {model.requirement} has SHA-256 {found}, expected {expected}: the package is not "
                f"the one this version was made for; check pip's index settings, or install {model.requirement} again"
            )


def _write_manifest(model: BundledModel, result: Path) -> None:
    files = {
        str(file.relative_to(result)): {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(result.rglob("*"))
        if file.is_file()
    }
    manifest = {"model": model.name, "source": model.requirement, "recipe": model.recipe, "files": files}
    (result / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _disk_full(model: BundledModel, where: Path) -> BackplaneError:
    return BackplaneError(
        f"not enough space in {where}: preparing {model.name} takes {model.disk_needed // MIB} MiB; free "
        "some, or set BACKPLANE_CACHE to a folder on another disk"
    )


@contextmanager
def _only_one(lock: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold `lock` among processes. The kernel releases it when the holder ends, however it ends."""
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares this model")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
