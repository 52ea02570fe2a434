"""Tests the commands of ``vllm-patchbay`` for patches, with the installed vLLM, a fabricated wheel and a tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_patchbay
from vllm_patchbay.cli import main
from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import PatchSet, take_fingerprint
from vllm_patchbay.upstream import SymbolIndex, installed_tree, installed_version

from .commands import COMMAND, TARGET, run

MAJOR, MINOR = installed_version().release[:2]
SERIES, EARLIER, LATER = (f"{MAJOR}.{minor}" for minor in (MINOR, MINOR - 1, MINOR + 1))
"""Series of the installed vLLM, and of the releases before and after it."""

PATCH = """
from vllm_patchbay.patch import Patch, Process

@Patch(
    target="{target}",
    process=Process.ENGINE,
    versions=">={series},<{later}",
    why="because of this",
    how="in that way",
    upstream="https://example.org/7",
    remove_when="the thing is fixed.",
    expires=">={series}.9",
    fingerprints={{"{series}.0": "{fingerprint}"}},
)
def stepping(self):
    return stepping.original(self)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    index = SymbolIndex(installed_tree())
    fingerprint = take_fingerprint(index.normalized_source_of(*TARGET.split(":")))
    folder = tmp_path / "site" / "some_patches" / "engine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder.parent / "__init__.py").touch()
    (folder / "patch_core.py").write_text(
        PATCH.format(target=TARGET, fingerprint=fingerprint, series=SERIES, later=LATER)
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield "some_patches"
    for name in [name for name in sys.modules if name.startswith("some_patches")]:
        del sys.modules[name]


def _wheel(folder: Path, old: str, new: str, version: str = f"{SERIES}.0") -> Path:
    """Writes a wheel of vLLM that has one module of the installed one, with a change."""
    source = installed_tree().read("vllm.v1.engine.core")
    assert source is not None
    assert old in source
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/v1/__init__.py", "")
        archive.writestr("vllm/v1/engine/__init__.py", "")
        archive.writestr("vllm/v1/engine/core.py", source.replace(old, new))
        archive.writestr(
            f"vllm-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
    return wheel


def test_list_and_show(capsys: pytest.CaptureFixture[str], package: str) -> None:
    status, listed = run(capsys, "list", "--package", package)
    assert (status, [(p["name"], p["target"], p["process"]) for p in listed]) == (0, [("stepping", TARGET, "engine")])
    status, shown = run(capsys, "show", "stepping", "--package", package)
    assert (status, shown["outcome"], shown["why"], shown["vllm"]) == (0, "fits", "because of this", f"{SERIES}.0")
    assert shown["fingerprint"] == shown["fingerprints"][f"{SERIES}.0"]


def test_the_default_is_every_announced_package(
    capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path
) -> None:
    metadata = tmp_path / "site" / "some_patches-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-patches\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm_patchbay.patches]\nsome = {package}\n")
    status, listed = run(capsys, "list")
    assert (status, [patch["name"] for patch in listed if patch["target"] == TARGET]) == (0, ["stepping"])


def test_every_command_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["audit"], ["list"], ["show"], ["check"], ["diff"], ["docs"], ["new"]):
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--help"])
        assert capsys.readouterr().out.startswith(" ".join(["usage: vllm-patchbay", *command]))


@pytest.mark.process
def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "vllm_patchbay", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"vllm-patchbay {vllm_patchbay.__version__}\n"


def test_an_unknown_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str], package: str) -> None:
    assert main(["show", "steping", "--package", package]) != 0
    assert "did you mean 'stepping'" in capsys.readouterr().err


def test_check_passes_on_the_installed_vllm(capsys: pytest.CaptureFixture[str], package: str) -> None:
    status, checked = run(capsys, "check", "--package", package)
    assert (status, checked["patches"][0]["outcome"]) == (0, "fits")


def test_check_finds_drift_in_a_wheel_without_importing_it(
    capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path
) -> None:
    wheel = _wheel(tmp_path, "def step(self)", "def step(self, moved=1)")
    status, checked = run(capsys, "check", "--package", package, "--vllm", str(wheel))
    assert (status, checked["patches"][0]["outcome"]) == (1, "incompatible")
    wheel = _wheel(tmp_path, "if not self.scheduler.has_requests():", "if self.scheduler.has_no_requests():")
    status, checked = run(capsys, "check", "--package", package, "--vllm", str(wheel))
    assert (status, checked["patches"][0]["outcome"]) == (1, "drifted")
    assert "has_no_requests" in checked["patches"][0]["diff"]


def test_the_diff_is_complete_if_the_old_source_is_cached(
    capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHBAY_CACHE", str(tmp_path / "cache"))
    old, new = "if not self.scheduler.has_requests():", "if self.scheduler.has_no_requests():"
    changed = _wheel(tmp_path, old, new)
    before = run(capsys, "check", "--package", package, "--vllm", str(changed))[1]["patches"][0]["diff"]
    assert "removed or changed)" in before
    assert "has_requests()" not in before
    kept = tmp_path / "cache" / "vllm-sources" / f"vllm-{SERIES}.0.zip"
    kept.parent.mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    _wheel(tmp_path / "kept", old, old).rename(kept)
    diff = run(capsys, "check", "--package", package, "--vllm", str(changed))[1]["patches"][0]["diff"]
    assert [line[:3] for line in diff.splitlines() if "requests():" in line] == ["  -", "  +"]


def test_check_finds_a_missing_target_in_a_tree(
    capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(_wheel(tmp_path, "def step(self)", "def walk(self)")) as archive:
        archive.extractall(tmp_path / "tree")
    status, checked = run(capsys, "check", "--package", package, "--vllm", str(tmp_path / "tree"))
    assert (status, checked["patches"][0]["outcome"]) == (1, "missing")


@pytest.mark.parametrize(
    ("version", "status", "outcome"),
    [
        (f"{SERIES}.9", 1, "expired"),
        (f"{EARLIER}.0", 0, "not needed"),
        (f"{SERIES}.0rc1", 0, "fits"),
        (f"{LATER}.0", 1, "not yet examined"),
        (f"{LATER}.0rc1", 1, "not yet examined"),
    ],
)
def test_check_decides_by_version(
    capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path, version: str, status: int, outcome: str
) -> None:
    file = tmp_path / "site" / package / "engine" / "patch_core.py"
    file.write_text(file.read_text().replace(f'expires=">={SERIES}.9"', f'expires="=={SERIES}.9"'))
    wheel = _wheel(tmp_path, "def step(self)", "def step(self)", version)
    got, checked = run(capsys, "check", "--package", package, "--vllm", str(wheel))
    assert (got, checked["patches"][0]["outcome"]) == (status, outcome)


def test_a_package_without_patches_is_an_error(
    capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path
) -> None:
    def error_of(name: str) -> str:
        assert main(["check", "--package", name]) == 1
        return capsys.readouterr().err

    assert "json has no patches" in error_of("json")
    assert "there is no package 'nope'" in error_of("nope")
    assert "the package 'nope.nowhere' cannot be imported" in error_of("nope.nowhere")
    assert "there is no package 'this'" in error_of("this")  # a module
    folder = tmp_path / "site" / package
    (folder / "workers").mkdir()
    (folder / "workers" / "patch_core.py").touch()
    assert "some_patches.workers.patch_core is not in a process folder" in error_of(package)
    (folder / "workers" / "patch_core.py").rename(folder / "patch_core.py")
    assert "some_patches.patch_core is not in a process folder" in error_of(package)
    (folder / "patch_core.py").rename(folder / "engine" / "core.py")
    assert "some_patches.engine.core is not called patch_<module>" in error_of(package)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("def broken(:", "SyntaxError: "),
        ("x = 1", "declares no patch"),
        ("# \0", "cannot be loaded"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_a_row_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "site" / package / "engine" / "patch_broken.py").write_text(text)
    status, checked = run(capsys, "check", "--package", package)
    assert status == 1
    assert [(row["name"], row["outcome"]) for row in checked["patches"]] == [
        ("stepping", "fits"),
        ("some_patches.engine.patch_broken", "cannot be loaded"),
    ]
    assert reason in checked["patches"][1]["detail"]
    assert main(["list", "--package", package]) == 1
    listed = capsys.readouterr()
    assert "stepping" in listed.out
    assert reason in listed.err
    assert main(["show", "stepping", "--package", package]) == 0
    assert main(["docs", "--package", package]) == 1
    with pytest.raises(PatchError, match=re.escape(reason)):
        PatchSet.of_package(package)


def test_a_tree_that_does_not_declare_its_version(
    capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(_wheel(tmp_path, "def step(self)", "def step(self)")) as archive:
        archive.extractall(tmp_path / "tree")
    for file in tmp_path.glob("tree/*.dist-info/*"):
        file.unlink()
    tree = str(tmp_path / "tree")
    assert main(["check", "--package", package, "--vllm", tree]) == 1
    error = capsys.readouterr().err
    assert tree in error
    assert "VERSION@PATH" in error
    assert "VLLM_VERSION" in error
    assert run(capsys, "check", "--package", package, "--vllm", f"{SERIES}.0@{tree}")[0] == 0
    monkeypatch.setenv("VLLM_VERSION", f"{SERIES}.0")
    assert run(capsys, "check", "--package", package, "--vllm", tree)[0] == 0


def test_diff_shows_what_changed(capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "if not self.scheduler.has_requests():", "if self.scheduler.has_no_requests():")
    status, report = run(capsys, "diff", "stepping", "--package", package, "--vllm", str(wheel))
    assert status == 0
    assert any(line.startswith("+") and "has_no_requests" in line for line in report["diff"])
    assert any(line.startswith("-") and "has_requests" in line for line in report["diff"])


@pytest.mark.process
def test_diff_does_not_take_an_edited_tree_for_what_it_was(package: str, tmp_path: Path) -> None:
    """An edited vLLM keeps its version. The published source is in the cache."""
    old, new = "if not self.scheduler.has_requests():", "if self.scheduler.has_no_requests():"
    with zipfile.ZipFile(_wheel(tmp_path, old, new)) as archive:
        archive.extractall(tmp_path / "edited")
    kept = tmp_path / "cache" / "vllm-sources" / f"vllm-{SERIES}.0.zip"
    kept.parent.mkdir(parents=True)
    _wheel(tmp_path, old, old).rename(kept)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "edited"), *sys.path]),
        "PATCHBAY_CACHE": str(tmp_path / "cache"),
        "VLLM_VERSION": f"{SERIES}.0",
    }

    def diff() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", COMMAND, "diff", "stepping", "--package", package]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    done = diff()
    assert [line[:1] for line in done.stdout.splitlines() if "requests():" in line] == ["-", "+"], done.stderr
    _wheel(tmp_path, old, "if self.something_else:").rename(kept)
    done = diff()
    assert done.returncode == 1
    assert "is not that of the published vllm.v1.engine.core:EngineCore.step" in done.stderr


def test_docs_have_every_field(capsys: pytest.CaptureFixture[str], package: str, tmp_path: Path) -> None:
    status, report = run(capsys, "docs", "--package", package)
    assert status == 0
    for text in ("stepping", TARGET, "because of this", "in that way", "https://example.org/7", "the thing is fixed."):
        assert text in report["page"]
    page = tmp_path / "page.md"
    assert main(["docs", "--package", package, "--output", str(page)]) == 0
    assert page.read_text() == report["page"]
    page.unlink()
    assert run(capsys, "docs", "--package", package, "--output", str(page)) == (0, report)
    assert page.read_text() == report["page"]
    assert main(["docs", "--package", package, "--output", str(page / "below")]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.process
def test_a_reader_that_closes_the_pipe(package: str, tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    child = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "show", "stepping", "--package", package],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == ""
    assert child.wait() == 141


@pytest.mark.process
def test_check_imports_nothing_of_vllm(package: str, tmp_path: Path) -> None:
    """With the installed vLLM, a wheel and a tree, the command reads only source."""
    wheel = _wheel(tmp_path, "def step(self)", "def step(self)")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "tree")
    program = (
        "import sys\n"
        "from vllm_patchbay.cli import main\n"
        "status = [main(['check', '--package', 'some_patches', '--vllm', spec]) for spec in sys.argv[1:]]\n"
        "print(status, sorted({'vllm', 'torch', 'vllm_backplane'} & set(sys.modules)))\n"
    )
    specs = ["installed", str(wheel), str(tmp_path / "tree")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program, *specs], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []"


def test_version_override_and_nonsense(
    capsys: pytest.CaptureFixture[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_VERSION", f"{SERIES}.1.dev3+gabc")
    assert run(capsys, "check", "--package", package)[1]["vllm"] == f"{SERIES}.1.dev3+gabc"
    monkeypatch.setenv("VLLM_VERSION", "newest")
    assert main(["check", "--package", package]) != 0
    assert "VLLM_VERSION" in capsys.readouterr().err
