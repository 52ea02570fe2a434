"""Runs `vllm-backplane patches`, here and as another project would."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from vllm_backplane.cli import main

TARGET = "vllm.v1.engine.core:EngineCore.step"
COMMAND = "import sys; from vllm_backplane.cli import main; sys.exit(main(sys.argv[1:]))"
EXPLAINED = ("--why", "a reason", "--how", "a way", "--upstream", "none: a test", "--remove-when", "never.")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main(["patches", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def python(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As in another project, without our platform."""
    variables = {**os.environ, "PYTHONPATH": programs.on_path(folder), "VLLM_PLUGINS": ""}
    return programs.run(programs.command(program, *arguments), cwd=folder, env=variables)
