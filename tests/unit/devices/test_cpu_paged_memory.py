"""Attention over a paged cache, and what writes that cache, under the sanitizers, with block tables made to do harm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "csrc" / "cpu"
# Of undefined behaviour what sizes and indices can bring about; all of it would take the compiler twice as long.
SANITIZERS = "-fsanitize=address,signed-integer-overflow,integer-divide-by-zero"
# Checks by calls rather than in line, likewise for the compiler.
OPTIONS = ("-std=c++20", "-O1", "-Wno-psabi", "-fopenmp", SANITIZERS, "-fno-sanitize-recover=all")
OPTIONS += ("--param", "asan-instrumentation-with-call-threshold=0")


def test_block_tables_that_lie_are_refused_and_others_served(tmp_path: Path) -> None:
    """Each of some thousand calls comes to what a plain loop comes to, or is refused and leaves its result alone."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "install a C++ compiler, or name one by CXX"
    folder = Path(torch.__file__).parent
    include = (f"-I{SOURCES}", "-isystem", f"{folder}/include", "-isystem", f"{folder}/include/torch/csrc/api/include")
    libraries = (f"-L{folder}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}/lib")
    program = tmp_path / "check"
    command = [compiler, *OPTIONS, *include, str(HERE / "paged_memory_check.cpp"), *libraries, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert built.returncode == 0, built.stderr[-4000:]
    # PyTorch keeps what it allocates at its loading for good.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    counted = re.search(r"(\d+) calls as expected, (\d+) of them refused", done.stdout)
    assert counted is not None, done.stdout
    calls, refused = map(int, counted.groups())
    assert calls >= 2000
    assert calls // 10 < refused < calls // 2
