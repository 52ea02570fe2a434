"""Tests that Backplane's own patches are counted and tested, and the command that shows them."""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_backplane.cli import main
from vllm_backplane.patches import OWN
from vllm_patchbay.patch import Outcome, Patch, PatchSet, verify
from vllm_patchbay.upstream import SourceTree, SymbolIndex, installed_tree

ROOT = Path(__file__).resolve().parents[3]


def own_patches() -> PatchSet:
    return PatchSet.of_packages([OWN]).require_complete()


def test_the_readme_has_the_number_of_patches() -> None:
    assert f"patches of vLLM: {len(own_patches().patches)}" in (ROOT / "README.md").read_text()


def test_every_patch_has_tests() -> None:
    for patch in own_patches().patches:
        stem = patch.module.rpartition(".")[2]
        for test in (f"tests/unit/patches/test_{stem}.py", f"tests/e2e/test_{stem}_running.py"):
            assert patch.name in _tested_names(ROOT / test), f"{test} has no test of {patch.name}"


def _tested_names(path: Path) -> set[str]:
    """Returns the names in a file if it has a test with an assertion, else an empty set."""
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    nodes = list(ast.walk(tree))
    tests = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    if not any(isinstance(node, ast.Assert) for test in tests for node in ast.walk(test)):
        return set()
    texts = [n.id for n in nodes if isinstance(n, ast.Name)]
    texts += [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {word for text in texts for word in re.findall(r"\w+", text)}


@pytest.mark.parametrize(
    ("text", "tested"),
    [
        ("def test_it():\n    assert mine()\n", True),
        ("def test_it():\n    assert 'mine applied'\n", True),
        ("def test_it():\n    assert other()\n", False),
        ("def test_it():\n    mine()\n", False),
        ("mine()\n", False),
        ("", False),
        (None, False),
    ],
)
def test_a_patch_without_a_test_of_its_own_is_noticed(tmp_path: Path, text: str | None, tested: bool) -> None:
    if text is not None:
        (tmp_path / "test_patch.py").write_text(text)
    assert ("mine" in _tested_names(tmp_path / "test_patch.py")) is tested


@pytest.mark.parametrize("patch", own_patches().patches, ids=lambda patch: patch.name)
def test_every_patch_reacts_to_a_changed_line(patch: Patch) -> None:
    tree = installed_tree()
    verdict = verify(patch, SymbolIndex(with_another_statement(tree, *patch.target.split(":"))), tree.version)
    assert verdict.outcome is Outcome.DRIFTED
    assert f"{patch.target} in vLLM {tree.version} is not what the patch was written against" in verdict.detail


def with_another_statement(tree: SourceTree, module: str, qualname: str) -> SourceTree:
    """Returns a tree of sources in which a function has one more statement."""
    parsed: ast.AST = ast.parse(tree.read(module) or "")
    *_, function = scope = [parsed]
    for name in qualname.split("."):
        [function] = [node for node in ast.iter_child_nodes(scope[-1]) if getattr(node, "name", None) == name]
        scope.append(function)
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    function.body.append(ast.Expr(ast.Constant(1)))
    changed, source = copy.copy(tree), ast.unparse(ast.fix_missing_locations(parsed))
    changed.read = lambda name: source if name == module else tree.read(name)  # type: ignore[method-assign]
    return changed


def test_the_command_shows_backplanes_patches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "list", "--json"]) == 0
    listed = {patch["name"] for patch in json.loads(capsys.readouterr().out)}
    assert {patch.name for patch in own_patches().patches} <= listed
    assert main(["patches", "show", "serve_htp"]) == 1
    assert "did you mean 'serve_http'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["patches", "list", "--package", "some_patches"])
    assert "--package" in capsys.readouterr().err


@pytest.mark.process
def test_the_check_imports_nothing_of_vllm() -> None:
    program = (
        "import sys\n"
        "from vllm_backplane.cli import main\n"
        "print(main(['patches', 'check']), sorted({'vllm', 'torch', 'vllm_backplane.platform'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stdout + done.stderr
