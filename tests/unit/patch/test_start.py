"""The version that decisions are made for, in a process that starts as vLLM's processes do."""

from __future__ import annotations

import os
import subprocess
import sys

START = """
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform

load_general_plugins()
current_platform.validate_environ(True)
from vllm_backplane.patch import lifecycle
print(type(current_platform).__name__, lifecycle.theatre().version, sorted(lifecycle.theatre().verdicts))
"""


def _start(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_stated_version_decides_and_vllm_accepts_the_variable() -> None:
    done = _start(VLLM_VERSION="0.32.1.dev3+gabcdef0")
    assert done.stdout.split() == ["BackplanePlatform", "0.32.1.dev3+gabcdef0", "['serve_http']"], done.stderr[-2000:]


def test_a_version_that_makes_no_sense_stops_the_start() -> None:
    done = _start(VLLM_VERSION="newest")
    assert done.returncode != 0
    assert "the variable VLLM_VERSION says 'newest', which is not a version" in done.stderr


def test_a_variable_that_nobody_knows_is_still_refused() -> None:
    """The check that the above passes is a real one."""
    done = _start(VLLM_VERSIONS="0.32.0")
    assert done.returncode != 0
    assert "Unknown vLLM environment variable detected: VLLM_VERSIONS" in done.stderr
