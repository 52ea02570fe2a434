"""Tests paged attention and the KV-cache writes under the sanitizers, with hostile block tables."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import compiled

pytestmark = [pytest.mark.compiler, pytest.mark.exhaustive]

HERE = Path(__file__).resolve().parent
SOURCES = compiled.ROOT / "csrc" / "cpu"
# Of undefined behaviour what sizes and indices can bring about; all of it would take the compiler twice as long.
SANITIZERS = "-fsanitize=address,signed-integer-overflow,integer-divide-by-zero"
# Checks by calls rather than in line, likewise for the compiler.
OPTIONS = ("-std=c++20", "-O1", "-Wno-psabi", "-fopenmp", SANITIZERS, "-fno-sanitize-recover=all")
OPTIONS += ("--param", "asan-instrumentation-with-call-threshold=0")


def test_wrong_block_tables_are_refused_and_others_served() -> None:
    """Each of some thousand calls gives what a plain loop gives, or is refused and leaves its result alone."""
    check = HERE / "paged_memory_check.cpp"
    program = compiled.build(
        "paged_memory_check",
        [*OPTIONS, f"-I{SOURCES}", *compiled.TORCH_INCLUDES, check, *compiled.TORCH_LIBRARIES],
        [SOURCES, check, HERE / "fuzzed_tensors.h"],
    )
    # PyTorch keeps what it allocates at its loading for good.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    counted = re.search(r"(\d+) calls as expected, (\d+) of them refused", done.stdout)
    assert counted is not None, done.stdout
    calls, refused = map(int, counted.groups())
    assert calls >= 2000
    assert calls // 10 < refused < calls // 2
