"""Tests the runner of the version matrix with instant commands in place of those of vLLM."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "matrix"))

import run as matrix
import steps

from vllm_backplane.settings.releases import RELEASES, SMOKE, Release


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Sets the Python code that each step runs; a step without code passes."""
    programs: dict[str, str] = {}

    def command(release: Release, step: str, folder: Path) -> list[str]:
        return [sys.executable, "-c", programs.get(step, "print('fine')")]

    monkeypatch.setattr(steps, "ROOT", tmp_path)
    monkeypatch.setattr(steps, "command", command)
    return programs


@pytest.mark.process
def test_all_pass(scripted: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert matrix.main([]) == 0
    shown = capsys.readouterr()
    head, *rows, end = shown.out.splitlines()
    assert head.split() == ["vLLM", *steps.STEPS]
    assert [row.split()[0] for row in rows] == [release.version for release in RELEASES]
    assert all(row.count("ok ") == len(steps.STEPS) for row in rows)
    assert end == f"All {len(steps.STEPS) * len(RELEASES)} steps passed."
    assert "[matrix] 0.31.0 chat: ok" in shown.err
    assert (tmp_path / ".venv-matrix-0.31.0/.backplane/logs/chat.log").read_text() == "fine\n"


@pytest.mark.process
def test_a_second_run_begins_with_empty_folders(scripted: dict[str, str], tmp_path: Path) -> None:
    left = tmp_path / ".venv-matrix-0.31.0/.backplane/logs/features-cpu/adapter"
    left.mkdir(parents=True)
    assert matrix.main(["0.31.0"]) == 0
    assert left.parent.is_dir() and not left.exists()


@pytest.mark.process
def test_a_step_that_fails_is_shown_and_the_rest_goes_on(
    scripted: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted["patches"] = "import sys; print('one drifted'); sys.exit(3)"
    assert matrix.main(["0.31.0"]) == 1
    shown = capsys.readouterr()
    row, end = shown.out.splitlines()[1:]
    assert row.split()[0] == "0.31.0"
    assert (row.count("failed"), row.count("ok ")) == (1, len(steps.STEPS) - 1)
    assert end == f"1 of {len(steps.STEPS)} steps failed."
    assert "one drifted" in shown.err
    assert "status 3" in shown.err


@pytest.mark.process
def test_without_its_environment_nothing_of_a_version_is_run(
    scripted: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted["environment"] = "raise SystemExit('no compiler')"
    assert matrix.main(["0.30.0", "--json"]) == 1
    outcomes = json.loads(capsys.readouterr().out)
    assert [(each["step"], each["status"]) for each in outcomes] == [
        ("environment", "failed"),
        *((step, "not run") for step in steps.STEPS[1:]),
    ]
    assert {each["version"] for each in outcomes} == {"0.30.0"}


@pytest.mark.process
def test_a_step_that_hangs_is_ended_with_what_it_started(
    scripted: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    scripted["chat"] = (
        "import pathlib, signal, subprocess, time\n"
        # A shell ignores SIGINT for its background jobs, and this process would inherit that.
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    command = steps.command

    def limited(release: Release, step: str, folder: Path) -> list[str]:
        # The limit is reached once, and is long enough for the step to start its child on a busy machine.
        monkeypatch.setattr(steps, "LIMIT_SECONDS", 8 if step == "chat" else 300)
        return command(release, step, folder)

    monkeypatch.setattr(steps, "command", limited)
    assert matrix.main(["0.32.0"]) == 1
    end = time.monotonic() + 60
    while lives(int(note.read_text())) and time.monotonic() < end:
        time.sleep(0.1)
    assert not lives(int(note.read_text()))


def lives(pid: int) -> bool:
    """Returns whether a process runs. A zombie does not; the machine's init process decides when it is reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_version_that_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        matrix.main(["0.29.0"])
    assert end.value.code == 2
    assert (
        f"0.29.0 is not supported; supported: {', '.join(release.version for release in RELEASES)}"
        in capsys.readouterr().err
    )


def test_the_real_commands() -> None:
    oldest = RELEASES[0]
    build = steps.command(oldest, "environment", Path("x"))
    assert build[:4] == ["make", "-C", str(steps.ROOT), "matrix-environment"]
    assert {"VENV=.venv-matrix-0.30.0", "VLLM_VERSION=0.30.0", "TORCH_VERSION=2.13.0"} <= set(build)
    static = steps.command(oldest, "static", Path("x"))
    assert static[-2:] == ["-k", "[0.30.0]"]
    assert all(Path(each).exists() for each in (*steps.command(oldest, "unit", Path("x"))[8:-2], static[4]))
    for step in steps.STEPS[1:]:
        assert Path(steps.command(oldest, step, Path("x"))[0]).parent == steps.ROOT / ".venv-matrix-0.30.0" / "bin"


def test_every_unit_test_that_imports_vllm_runs_with_each_release() -> None:
    unit = steps.ROOT / "tests" / "unit"
    imports = re.compile(r"^\s*(from|import) vllm[. ]", re.M)
    # Those of vllm_patchbay contain such lines as texts; the pages are checked with the newest release.
    left_out = ("patchbay/", "versions/", "test_docs.py")
    files = [path.relative_to(unit).as_posix() for path in sorted(unit.glob("**/test_*.py"))]
    files = [path for path in files if not path.startswith(left_out)]
    found = {path for path in files if imports.search((unit / path).read_text())}
    assert len(found) > 30
    assert {path for path in found if not path.startswith(steps.UNIT)} == set()


@pytest.mark.parametrize("feature", ["LoRA", "GGUF", "sleep", "graphs", "draft tokens"])
def test_each_feature_is_run_once_on_each_device(feature: str) -> None:
    """Reads the jobs of the program from its source, because its modules are those of the end-to-end tests."""
    tree = ast.parse((steps.ROOT / "tests" / "matrix" / "smoke.py").read_text())
    [features] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "features"]
    [jobs] = [
        node.value
        for node in features.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == "jobs"
    ]
    assert [ast.literal_eval(key) for key in jobs.keys if key is not None].count(feature) == 1
    assert {"features-cpu", "features-sim"} <= set(steps.STEPS)
    assert feature in SMOKE
