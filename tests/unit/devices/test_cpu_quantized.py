"""The C++ products of quantized linear layers, with every instruction set that the machine has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare_quantized_products import PARTS

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "csrc" / "cpu"
SETS = ("portable", "avx2", "avx-vnni", "avx512-vnni", "amx", "neon", "dotprod")

Report = dict[str, list[str]]


@pytest.fixture(scope="module", params=SETS)
def report(request: pytest.FixtureRequest) -> Report:
    run = subprocess.run(
        [sys.executable, str(HERE / "compare_quantized_products.py"), request.param],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: Report | None = json.loads(run.stdout.splitlines()[-1])
    if found is None:
        pytest.skip(f"this machine does not have {request.param}")
    return found


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_products_agree_with_integers_and_float64(report: Report, part: str) -> None:
    assert report[part] == []


SANITIZED = ("-std=c++20", "-O1", "-Wno-psabi", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def sanitized(folder: Path, sources: list[Path], options: list[str]) -> str:
    """What a program says that is compiled with the sanitizers for addresses and undefined behaviour."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "install a C++ compiler, or name one by CXX"
    check = folder / "check"
    command = [compiler, *SANITIZED, f"-I{SOURCES}", *map(str, sources), *options, "-o", str(check)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert built.returncode == 0, built.stderr[-4000:]
    # PyTorch keeps what it allocates at its loading for good.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run([str(check)], capture_output=True, text=True, timeout=800, env=environment)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


def test_products_stay_within_their_memory(tmp_path: Path) -> None:
    """The same products without PyTorch."""
    sources = [file for file in sorted(SOURCES.glob("dot_*.cpp")) if file.name != "dot_kernels.cpp"]
    said = sanitized(tmp_path, [HERE / "dot_products_check.cpp", *sources], [])
    assert "portable: " in said and "products as expected" in said


def test_layers_stay_within_their_memory(tmp_path: Path) -> None:
    """The operator as a whole: rounding of the input, chunks, tiles, results."""
    torch_folder = Path(torch.__file__).parent
    sources = [*sorted(SOURCES.glob("dot_*.cpp")), *(SOURCES / f"{n}.cpp" for n in ("isa", "quantize_rows"))]
    options = ["-fopenmp", f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
    options += [f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    sources += [SOURCES / "quantized_linear.cpp", HERE / "quantized_linear_check.cpp"]
    said = sanitized(tmp_path, sources, options)
    assert "portable: " in said and "layers as expected" in said
