"""Tests that a large hostile file takes a small multiple of its size in memory, and seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import AT_START
from tests.fuzz.large_files import FILES, MIB

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SECONDS, MULTIPLE = 10, 8
"""Limits for the time of the processor, and for memory as a multiple of the file's size."""
ALWAYS = ("inner arrays", "merges")
"""Cases that run in every test run. Each of the others takes seconds."""
REFUSED = {
    "inner arrays": "more than 4096 arrays in arrays",
    "merges": "1048576 merges for 4 tokens",
    "tensors": "has a tensor 'ttt",
    "more tensors": "declares 200000 tensors",
}
"""Reasons for which files are refused. The others are accepted."""


@pytest.mark.parametrize(
    "case", [one if one in ALWAYS else pytest.param(one, marks=pytest.mark.exhaustive) for one in FILES]
)
def test_a_large_file_takes_little_time_and_memory(case: str, tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(FILES[case]())
    size = path.stat().st_size
    assert 8 * MIB <= size <= 40 * MIB
    command = [sys.executable, "-m", "tests.fuzz.large_files", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=AT_START, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refusal, seconds, memory = json.loads(done.stdout)
    assert (REFUSED[case] in refusal) if case in REFUSED else not refusal, refusal
    assert seconds < SECONDS and memory < MULTIPLE * size, f"{seconds:.1f} s, {memory / size:.1f} times the file"
