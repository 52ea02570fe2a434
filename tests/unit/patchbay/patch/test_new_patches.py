"""Tests ``vllm-patchbay new``, and the use of its files as the documentation shows it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_patchbay.cli import main
from vllm_patchbay.upstream.versions import installed_folder, installed_version

from .commands import COMMAND, TARGET, TEXTS, python, run


@pytest.mark.process
def test_what_new_writes_fails_a_check_of_the_next_version(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Otherwise later versions would skip the patch without a message."""
    where = ("--root", str(tmp_path), "--package", "fresh.patches")
    assert run(capsys, "new", "vllm.utils.mem_constants:GB_bytes", "--process", "engine", *where, *TEXTS)[0] == 0
    major, minor = installed_version().release[:2]
    for version, status in ((f"{major}.{minor}.0", 0), (f"{major}.{minor + 1}.0", 1), (f"{major}.{minor + 8}.0", 1)):
        spec = f"{version}@{installed_folder()}"
        done = python(tmp_path, COMMAND, "check", "--package", "fresh.patches", "--vllm", spec)
        assert done.returncode == status, done.stdout + done.stderr
    assert "not yet examined" in done.stdout


def test_new_refuses_what_could_not_be_imported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["new", "vllm.utils.mem_constants:GB_bytes", "--process", "engine"]
    (tmp_path / "file").touch()
    for more, message in (
        (["--root", str(tmp_path), "--package", "my-plugin.x"], "'my-plugin.x' is not the dotted name of a package"),
        (["--root", str(tmp_path), "--package", "p", "--upstream", "u"], "neither a link"),
        (["--root", str(tmp_path / "file"), "--package", "p"], "cannot write below"),
    ):
        assert main([*arguments, *more]) == 1
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    why = 'it says """no""" and \\ and "quotes"'
    assert main([*arguments, "--root", str(tmp_path), "--package", "p", "--why", why]) == 0
    ast.parse((tmp_path / "p" / "engine" / "patch_mem_constants.py").read_text())


def test_new_writes_a_patch_that_cannot_be_imported_before_its_fields_are_filled_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("new", TARGET, "--process", "engine", "--root", str(tmp_path), "--package", "fresh.patches")
    status, report = run(capsys, *arguments)
    assert status == 0
    assert report["missing"] == ["why", "how", "upstream", "remove_when"]
    assert [Path(path).name for path in report["written"]] == [
        "patch_core.py",
        "test_patch_core.py",
        "test_patch_core_running.py",
    ]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["list", "--package", "fresh.patches"]) != 0
    assert "the field 'why' is empty" in capsys.readouterr().err
    patch = Path(report["written"][0])
    text = patch.read_text()
    for field in ("why", "how", "remove_when"):
        text = text.replace(f'{field}=""', f'{field}="filled in"')
    patch.write_text(text.replace('upstream=""', 'upstream="none: a test"'))
    for name in [name for name in sys.modules if name.startswith("fresh")]:
        del sys.modules[name]
    status, checked = run(capsys, "check", "--package", "fresh.patches")
    assert (status, checked["patches"][0]["outcome"]) == (0, "fits")
    assert main([*arguments]) != 0
    assert "exists" in capsys.readouterr().err


@pytest.mark.process
def test_new_writes_patches_of_every_kind_and_unit_tests_that_pass(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    targets = {
        "method": TARGET,
        "async method": "vllm.v1.engine.async_llm:AsyncLLM.abort",
        "static method": "vllm.v1.executor.abstract:Executor.get_class",
        "class method": "vllm.v1.request:Request.from_engine_core_request",
        "property": "vllm.v1.kv_cache_interface:KVCacheSpec.page_size_bytes",
        "function": "vllm.utils.math_utils:cdiv",
        "class": "vllm.v1.sample.metadata:SamplingMetadata",
        "constant": "vllm.utils.mem_constants:GB_bytes",
    }
    tests = []
    for target in targets.values():
        where = ("--process", "engine", "--root", str(tmp_path), "--package", "fresh.patches")
        status, report = run(capsys, "new", target, *where, *TEXTS)
        assert (status, report["missing"]) == (0, [])
        tests.append(report["written"][1])
        assert not any("backplane" in Path(path).read_text() for path in report["written"])
    done = python(tmp_path, EVERY_KIND)
    assert done.stdout.splitlines() == [f"{len(targets)} applied and undone"], done.stderr
    done = _pytest(tmp_path, [tests[-1], tests[list(targets).index("property")]])
    assert "4 passed" in done.stdout, done.stdout
    # They fail with a vLLM that is not the one that the patch was written against.
    patch = tmp_path / "fresh" / "patches" / "engine" / "patch_mem_constants.py"
    patch.write_text(re.sub(r'"[0-9a-f]{16} ', '"0123456789abcdef ', patch.read_text()))
    assert "2 failed" in _pytest(tmp_path, tests[-1:]).stdout


EVERY_KIND = """
from vllm_patchbay.patch import PatchSession, PatchSet, Process
from vllm_patchbay.patch.rebinding import find_target

session = PatchSession.for_installed_vllm()
patches = PatchSet.of_package("fresh.patches")
before = [find_target(patch) for patch in patches.patches]
session.apply(patches, Process.ENGINE)
assert len(session.rebindings) == len(patches.patches)
assert all(vars(owner)[name] is not raw for owner, name, raw in before if not isinstance(raw, int))
session.undo()
assert all(vars(owner)[name] is raw for owner, name, raw in before)
print(len(before), "applied and undone")
"""


def _pytest(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    return python(folder, "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", "-q", "-c", "/dev/null", *tests)


def test_new_names_where_a_target_really_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for target, message in (
        ("vllm:LLM", "is imported from vllm.entrypoints.llm:LLM; patch it there"),
        ("vllm.v1.core.sched.async_scheduler:AsyncScheduler.schedule", "is inherited from vllm.v1.core.sched."),
        ("vllm.v1.engine.core", "names only a module"),
    ):
        where = ("--root", str(tmp_path), "--package", "fresh.patches")
        assert main(["new", target, "--process", "engine", *where]) != 0
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_new_refuses_a_target_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["new", "vllm.v1.engine.core:EngineCore.stp", "--process", "engine", "--root", str(tmp_path)]
    assert main([*arguments, "--package", "fresh.patches"]) == 1
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "--package" in capsys.readouterr().err


@pytest.mark.process
def test_the_documented_use_in_another_plugin(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Runs the lines of the page in a process that has loaded neither Backplane nor vLLM."""
    page = (Path(__file__).resolve().parents[4] / "docs" / "plugin" / "patching.md").read_text()
    [lines] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "session.apply(" in block]
    where = ("--process", "worker", "--root", str(tmp_path), "--package", "my_plugin.patches")
    assert run(capsys, "new", "vllm.utils.mem_constants:GB_bytes", *where, *TEXTS)[0] == 0
    patch = tmp_path / "my_plugin" / "patches" / "worker" / "patch_mem_constants.py"
    patch.write_text(patch.read_text().replace("1000000000", "7"))
    # A patch of a feature that is not used here is not even loaded.
    assert run(capsys, "new", "vllm.v1.sample.metadata:SamplingMetadata", "--on-import", *where, *TEXTS)[0] == 0
    feature = patch.with_name("patch_metadata.py")
    feature.write_text(
        feature.read_text().replace("import annotations\n", "import annotations\nimport no_such_library\n")
    )
    program = (
        f"import sys\n{lines}\n"
        "print(sorted({'vllm', 'torch', 'vllm_backplane'} & set(sys.modules)))\n"
        "from vllm.utils import mem_constants\n"
        "print(mem_constants.GB_bytes, 'vllm_backplane' in sys.modules)\n"
        "session.undo()\n"
        "print(mem_constants.GB_bytes)\n"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "7 False", "1000000000"], done.stderr
