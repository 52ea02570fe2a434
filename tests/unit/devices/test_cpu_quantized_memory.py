"""The C++ products of quantized linear layers under the sanitizers for addresses and undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "csrc" / "cpu"
OPTIONS = ("-std=c++20", "-O1", "-Wno-psabi", "-fopenmp")
# Of undefined behaviour what addresses, sizes and numbers can bring about and the address sanitizer does not see; the
# rest would take the compiler twice as long.
SANITIZED = (
    "-fsanitize=address,alignment,bounds,integer-divide-by-zero,shift,signed-integer-overflow",
    "-fno-sanitize-recover=all",
)
OUT_OF_LINE = ("--param", "asan-instrumentation-with-call-threshold=0")
"""Each access is checked by a call: written out, the checks make functions in which GCC spends minutes."""
FLAGS = {"dot_i8mm": "i8mm", "dot_amx": "amx_int8", "dot_amx_bf16": "amx_bf16"}
"""Of the processor, for products that not every one has, and that take long to compile with checks nobody would see."""


@cache
def compiler() -> tuple[list[str], list[str]]:
    """The command, and what it takes for checks."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    assert found is not None, "install a C++ compiler, or name one by CXX"
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    return [found, *OPTIONS], [*SANITIZED, *(() if "clang" in told else OUT_OF_LINE)]


def compile_in(folder: Path, *arguments: str | Path, checked: bool = True) -> None:
    command, checks = compiler()
    command = [*command, *(checks if checked else ()), f"-I{SOURCES}", *map(str, arguments)]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800)
    assert built.returncode == 0, built.stderr[-4000:]


def run(program: Path) -> str:
    # PyTorch keeps what it allocates at its loading for good.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The products of every instruction set, compiled once: that takes longest."""
    folder = tmp_path_factory.mktemp("products")
    files = {file.stem: file for file in SOURCES.glob("dot_*.cpp") if file.name != "dot_kernels.cpp"}
    processor = Path("/proc/cpuinfo").read_text().split()
    others = [files.pop(name) for name, flag in FLAGS.items() if flag not in processor]
    compile_in(folder, "-c", *files.values())
    if others:
        compile_in(folder, "-c", *others, checked=False)
    # Of what several have, the linker takes the first.
    return [folder / f"{source.stem}.o" for source in (*files.values(), *others)]


def test_products_stay_within_their_memory(products: list[Path], tmp_path: Path) -> None:
    """The products alone, without PyTorch."""
    compile_in(tmp_path, HERE / "dot_products_check.cpp", *products, "-o", "check")
    said = run(tmp_path / "check")
    assert "portable: " in said and "products as expected" in said


def test_layers_stay_within_their_memory(products: list[Path], tmp_path: Path) -> None:
    """The operator as a whole: rounding of the input, chunks, tiles, results."""
    torch_folder = Path(torch.__file__).parent
    include = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    # What has PyTorch's headers is compiled together: they take longer than all the rest.
    together = [SOURCES / "quantize_rows.cpp", SOURCES / "quantized_linear.cpp", HERE / "quantized_linear_check.cpp"]
    (tmp_path / "together.cpp").write_text("".join(f'#include "{source}"\n' for source in together))
    sources = [SOURCES / "dot_kernels.cpp", SOURCES / "isa.cpp", "together.cpp"]
    compile_in(tmp_path, *include, *sources, *products, *libraries, "-o", "check")
    said = run(tmp_path / "check")
    assert "portable: " in said and "layers as expected" in said
