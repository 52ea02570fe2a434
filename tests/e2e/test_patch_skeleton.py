"""Tests that the end-to-end test of ``vllm-patchbay new`` passes in a real engine, and fails without the patch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_patchbay.cli import main

pytestmark = pytest.mark.server

TEXTS = ("--why", "a reason", "--how", "a way", "--upstream", "none: a test", "--remove-when", "never.")


def _pytest(folder: Path, test: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(test)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def test(tmp_path: Path) -> Path:
    """Returns the end-to-end test that the command wrote for a new patch."""
    target = "vllm.v1.engine.core:EngineCore.step"
    where = ("--process", "engine", "--root", str(tmp_path), "--package", "fresh.patches")
    assert main(["new", target, *where, *TEXTS]) == 0
    return tmp_path / "tests" / "e2e" / "test_patch_core_running.py"


@pytest.mark.exhaustive
def test_it_fails_while_no_distribution_has_an_entry_point_for_the_package(test: Path, tmp_path: Path) -> None:
    done = _pytest(tmp_path, test)
    assert "1 failed" in done.stdout, done.stdout
    assert "step applied" in done.stdout, done.stdout  # the assertion that failed


def test_it_passes_with_the_patch(test: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "fresh-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm_backplane.patches]\nfresh = fresh.patches\n")
    done = _pytest(tmp_path, test)
    assert "1 passed" in done.stdout, done.stdout
