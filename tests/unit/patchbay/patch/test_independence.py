"""Tests that Patchbay needs neither vLLM nor PyTorch nor Backplane, so that any plugin can use it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_patchbay

PACKAGE = Path(vllm_patchbay.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Yields the top-level packages that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_the_standard_library_and_packaging_alone(path: Path) -> None:
    assert set(imported(path)) <= {*sys.stdlib_module_names, "packaging", "vllm_patchbay"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_does_not_name_backplane(path: Path) -> None:
    """This includes the templates of generated files."""
    assert "vllm_backplane" not in path.read_text()


@pytest.mark.process
def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "vllm_patchbay", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"vllm-patchbay {vllm_patchbay.__version__}\n"
