"""Tests the upgrade report of this repository: `make upgrade`, the recorded verdicts, and processor time."""

from __future__ import annotations

import io
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from vllm_backplane.cli import build_parser as backplane
from vllm_backplane.settings.releases import NEWEST
from vllm_patchbay.cli import build_parser as patchbay
from vllm_patchbay.upgrade import Section

ROOT = Path(__file__).resolve().parents[3]
VERDICTS = tomllib.loads((ROOT / "docs/plugin/upgrade-0.33.toml").read_text())
MOST_SECONDS = 60
"""Limit for the processor time of a report, in all its processes."""


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs make as if the environment were set up."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    command = ["make", "-C", str(ROOT), "-o", ".venv/.backplane/plugin", "upgrade", "VENV=.venv", "ARGS=", *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "VLLM_"))}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


@pytest.mark.process
def test_make_upgrade_runs_commands_that_exist() -> None:
    done = make("--dry-run", "VERSION=9.9.9")
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" || ")[0].partition(" > ")[0] for line in done.stdout.splitlines()]
    given = {Path(words[0]).name: words[1:] for words in map(shlex.split, lines) if words and "/bin/" in words[0]}
    assert given.keys() == {"vllm-patchbay", "vllm-backplane"}
    report = patchbay().parse_args(given["vllm-patchbay"])
    assert (report.before, report.after) == (NEWEST.version, "9.9.9")
    assert (ROOT / report.path).is_dir()
    assert report.output == Path("build/upgrade-9.9.9.md")
    assert backplane().parse_args(given["vllm-backplane"]).vllm == "9.9.9"


@pytest.mark.process
def test_make_upgrade_asks_for_a_release() -> None:
    done = make()
    assert done.returncode == 2
    assert "Name a release: make upgrade VERSION=" in done.stderr


def test_each_task_has_one_verdict() -> None:
    for task in VERDICTS["tasks"]:
        assert task["section"] in {section.name.lower() for section in Section}
        assert ("change" in task) != ("not_needed" in task)
        assert task.get("change", "masks") in VERDICTS["changes"]


@pytest.mark.exhaustive
@pytest.mark.download
def test_the_verdicts_are_about_the_tasks_of_the_report(tmp_path: Path) -> None:
    """Makes the report of the package as it stood, with the recorded command, and compares its tasks."""
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", VERDICTS["commit"], "vllm_backplane"], capture_output=True, check=False
    )
    if packed.returncode:
        assert not os.environ.get("CI"), "fetch the whole history, which has the commit that the report is about"
        pytest.skip(f"this checkout does not have the commit {VERDICTS['commit']}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(tmp_path, filter="data")
    program, *arguments = VERDICTS["command"].split()
    assert program == "vllm-patchbay"
    before = _processor_seconds()
    command = [sys.executable, "-m", "vllm_patchbay", *arguments, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert _processor_seconds() - before < MOST_SECONDS
    assert done.returncode == 1, done.stderr
    left = [(item["section"], item["subject"]) for item in json.loads(done.stdout)["items"]]
    for task in VERDICTS["tasks"]:
        for subject in task["subjects"]:
            text = subject.removesuffix("…")
            same = [each for each in left if each[0] == task["section"] and each[1].startswith(text)]
            same = same if text != subject else [each for each in same if each[1] == text]
            assert same, f"the report has no more task {subject!r}"
            left.remove(same[0])
    assert left == []


def _processor_seconds() -> float:
    """Returns the processor time of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
