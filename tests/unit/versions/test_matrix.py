"""Tests the runner of the version matrix with instant commands in place of those of vLLM."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "matrix"))

import run as matrix
import steps

from vllm_backplane.settings.releases import RELEASES, Release


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
    assert all((steps.ROOT / "tests" / "unit" / name).is_dir() for name in steps.UNIT)
    for step in steps.STEPS[1:]:
        assert Path(steps.command(oldest, step, Path("x"))[0]).parent == steps.ROOT / ".venv-matrix-0.30.0" / "bin"
