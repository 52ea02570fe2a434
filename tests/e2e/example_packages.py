"""Installs packages of examples/ with pip into a folder, as a user would install them into an environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index")


def install(name: str, folders: pytest.TempPathFactory) -> Path:
    """Installs the package, and returns its folder, which belongs into PYTHONPATH."""
    source, target = folders.mktemp("source") / name, folders.mktemp("site")
    # pip builds a copy, because a build leaves files in the source folder.
    shutil.copytree(EXAMPLES / name, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    done = subprocess.run(
        [sys.executable, *INSTALL, "--no-build-isolation", "--target", str(target), str(source)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target
