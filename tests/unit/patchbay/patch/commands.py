"""Runs ``vllm-patchbay`` in this process, and programs in another one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.environment import AT_START
from vllm_patchbay.cli import main

TARGET = "vllm.v1.engine.core:EngineCore.step"
COMMAND = "import sys; from vllm_patchbay.cli import main; sys.exit(main(sys.argv[1:]))"
TEXTS = ("--why", "a reason", "--how", "a way", "--upstream", "none: a test", "--remove-when", "never.")
"""Arguments of ``new`` for the fields that an author writes."""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Returns the exit status of a command and what it prints as JSON."""
    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def python(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder of another project, without Backplane's platform."""
    variables = {**AT_START, "PYTHONPATH": programs.on_path(folder), "VLLM_PLUGINS": ""}
    return programs.run(programs.command(program, *arguments), cwd=folder, env=variables)
