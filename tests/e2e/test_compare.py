"""Tests the command of the benchmarks, with a model shape that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.server
@pytest.mark.exhaustive
def test_the_command_measures_saves_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.compare", "--quick", "--models", "tiny", "--only", "decode"]
    command += ["--variants", "ours/fp32", "--output", str(tmp_path / "results"), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)
    assert not run["failures"]
    points = [sample["point"] for sample in run["samples"]]
    assert points == ["1 sequence", "1 sequence", "16 sequences", "16 sequences"]
    assert all(sample["value"] > 0 for sample in run["samples"])
    assert str(tmp_path) not in json.dumps(run)
    assert (tmp_path / "results" / "tiny-decode.svg").exists()
    assert "| ours/fp32 |" in (tmp_path / "results" / "README.md").read_text()
    report = [*command[:3], "--report", "--output", str(tmp_path / "results")]
    reported = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert reported.returncode == 0 and "| ours/fp32 |" in reported.stdout


@pytest.mark.server
def test_an_engine_that_cannot_start_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.compare", "--quick", "--models", "tiny", "--only", "decode"]
    command += ["--variants", "ours/fp32", "--timeout", "0.5", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "made no progress within" in done.stderr
    assert "## Failed" in (tmp_path / "README.md").read_text()
