"""Prepares bundled models once per user, in a cache folder that several processes may share.

A prepared folder appears by a rename and has a manifest of its files. An interrupted preparation therefore leaves no
folder that looks complete, and a damaged folder is detected and prepared again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from vllm_backplane.errors import BackplaneError
from vllm_backplane.models.bundled import MIB, BundledModel, find
from vllm_backplane.models.package import fetch, installed_content, sha256
from vllm_backplane.private_folder import private_folder

MANIFEST = "backplane-manifest.json"


def cache_folder() -> Path:
    """Returns the folder for downloads that a user requested with a command of this package.

    That is $BACKPLANE_CACHE, otherwise vllm-backplane in the user's cache folder.
    """
    if (configured := _configured_folder()) is not None:
        return configured
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification requires that a relative path is ignored.
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "vllm-backplane"


def derived_folder() -> Path:
    """Returns the folder for files that the plugin derives from the user's files while vLLM runs.

    That is $BACKPLANE_CACHE, otherwise a folder of the user among temporary files: a plugin should not write to a home
    folder without a request.
    """
    if (configured := _configured_folder()) is not None:
        try:
            create(configured)
        except OSError as fault:
            raise BackplaneError(
                f"cannot create {configured} (BACKPLANE_CACHE): {fault}; set it to a writable folder"
            ) from fault
        return configured
    return private_folder(remedy="set BACKPLANE_CACHE to a folder of your own")


def _configured_folder() -> Path | None:
    """Returns $BACKPLANE_CACHE, which may not exist yet. Raises if another user, except root, can change files in it:
    they include the manifests with which files are compared."""
    configured = os.environ.get("BACKPLANE_CACHE")
    if not configured:
        return None
    folder = Path(configured).expanduser().absolute()
    if not folder.is_dir():
        return folder
    found = folder.stat()
    # The owner of a link can lead it to another folder later.
    others = {found.st_uid, folder.lstat().st_uid} - {os.getuid(), 0}
    if others:
        raise BackplaneError(
            f"{folder} (BACKPLANE_CACHE) belongs to another user (uid {others.pop()}), so that the files in it cannot "
            "be trusted; set it to a folder of your own, or run the program as that user"
        )
    if found.st_mode & 0o022:
        remedy = f", or run 'chmod go-w {folder}'" if found.st_uid == os.getuid() else ""
        raise BackplaneError(
            f"other users can write in {folder} (BACKPLANE_CACHE), so that the files in it cannot be trusted; set it "
            f"to a folder of your own{remedy}"
        )
    return folder


def create(folder: Path) -> None:
    """Creates a folder in the cache, and its parents. Other users cannot write in the new ones, whatever the umask."""
    for one in (*reversed(folder.parents), folder):
        one.mkdir(mode=0o755, exist_ok=True)
    _configured_folder()  # another user may have created it since it was checked


def close_to_others(folder: Path) -> None:
    """Removes the permission to write of all other users from a new folder and everything in it, whatever the umask."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o022)


def prepared_folder(model: BundledModel) -> Path:
    """Returns the folder of the prepared model, which may not exist yet. Its name contains the version and recipe."""
    return cache_folder() / "models" / f"{model.name}-{model.version}-{model.recipe}"


def packaged(model: BundledModel) -> Path | None:
    """Returns the model's file in the installed package, for a model that is served in place."""
    return installed_content(model.package, model.version, model.content) if model.in_place else None


def damage(folder: Path, *, hashes: bool = False) -> str:
    """Returns why `folder` is not a complete prepared model, or an empty string if it is complete.

    File sizes are always compared with the manifest, contents only with `hashes`.
    """
    if not folder.is_dir():
        return "not prepared"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        expected = [(name, one["size"], one["sha256"]) for name, one in files.items()]
    except FileNotFoundError:
        return "it has no manifest"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its manifest cannot be read"
    for name, size, digest in expected:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if hashes and sha256(file) != digest:
            return f"{name} has changed"
    return ""


def obtain(name: str, progress: Callable[[str], None] = lambda _message: None, *, verify: bool = False) -> Path:
    """Returns the folder of a bundled model, prepared if needed, or its file in the installed package.

    `verify` compares the contents of files, instead of their sizes only.
    """
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
        create(folder.parent)
        with exclusive(folder.parent / f".{model.name}.lock", progress):
            # Another process may have prepared the model while this one waited for the lock.
            fault = damage(folder, hashes=verify)
            if fault:
                if folder.exists():
                    progress(f"preparing {model.name} again: {fault}")
                _prepare(model, folder, progress)
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(model, folder.parent) from fault
        raise BackplaneError(
            f"cannot prepare {model.name} in {folder.parent}: {fault}; set BACKPLANE_CACHE to a writable folder"
        ) from fault
    return folder


def _prepare(model: BundledModel, folder: Path, progress: Callable[[str], None]) -> None:
    _require_libraries(model)
    # The lock is held, so partial folders of this model belong to processes that have ended.
    for leftover in folder.parent.glob(f".{model.name}-*.partial"):
        shutil.rmtree(leftover)
    if shutil.disk_usage(folder.parent).free < model.disk_needed:
        raise _disk_full(model, folder.parent)
    # The scratch folder is beside the result, because a rename is atomic only within a file system.
    with tempfile.TemporaryDirectory(".partial", f".{model.name}-", folder.parent) as scratch:
        package, result = Path(scratch, "package"), Path(scratch, "result")
        package.mkdir()
        result.mkdir()
        content = fetch(model.package, model.version, model.content, package, progress)
        _check_digests(model, content)
        model.prepare(content, result, progress)
        progress("writing the manifest")
        _write_manifest(model, result)
        close_to_others(result)
        if folder.exists():
            folder.rename(Path(scratch, "damaged"))
        result.rename(folder)
    progress(f"{model.name} is ready in {folder}")


def _require_libraries(model: BundledModel) -> None:
    """Raises `BackplaneError` for missing libraries, before anything is downloaded or imported."""
    missing = [library for library in model.libraries if find_spec(library) is None]
    if missing:
        requirements = " ".join(shlex.quote(model.libraries[library]) for library in missing)
        raise BackplaneError(f"preparing {model.name} needs {', '.join(missing)}; run: pip install {requirements}")


def _check_digests(model: BundledModel, content: Path) -> None:
    root = Path(str(content).removesuffix(model.content.rstrip("/")))
    for name, expected in model.digests:
        found = sha256(root / name)
        if found != expected:
            raise BackplaneError(
                f"{name} of {model.requirement} has SHA-256 {found}, expected {expected}: the package's content has "
                f"changed; check pip's index settings, or install {model.requirement} again"
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
        "some space, or set BACKPLANE_CACHE to a folder on another disk"
    )


@contextmanager
def exclusive(
    lock: Path, progress: Callable[[str], None], waiting: str = "waiting for another process that prepares this model"
) -> Iterator[None]:
    """Holds `lock`, which one process at a time can hold. The kernel releases it when the process ends or is killed.

    If another process holds it, `progress` is called with `waiting` first.
    """
    try:
        opened = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as fault:
        raise BackplaneError(f"cannot open {lock}: {fault.strerror}; remove it, or set BACKPLANE_CACHE") from fault
    with os.fdopen(opened, "r+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(waiting)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
