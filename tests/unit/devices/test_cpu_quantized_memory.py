"""Tests the C++ kernels of quantized linear layers under the sanitizers for addresses and undefined behaviour."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import compiled

pytestmark = [pytest.mark.compiler, pytest.mark.exhaustive]

HERE = Path(__file__).resolve().parent
SOURCES = compiled.ROOT / "csrc" / "cpu"
OPTIONS = ("-std=c++20", "-O1", "-Wno-psabi", "-fopenmp", f"-I{SOURCES}")
# Of undefined behaviour what addresses, sizes and numbers can bring about and the address sanitizer does not see; the
# rest would take the compiler twice as long.
SANITIZED = (
    "-fsanitize=address,alignment,bounds,integer-divide-by-zero,shift,signed-integer-overflow",
    "-fno-sanitize-recover=all",
)
OUT_OF_LINE = ("--param", "asan-instrumentation-with-call-threshold=0")
"""GCC checks each access by a call. Inlined checks make functions in which GCC spends minutes."""
FLAGS = {"dot_i8mm": "i8mm", "dot_amx": "amx_int8", "dot_amx_bf16": "amx_bf16"}
"""Files that need a processor flag. They take long to compile, and without the flag their checks would never run."""


def checks() -> tuple[str, ...]:
    return (*SANITIZED, *(() if compiled.is_clang(compiled.compiler()) else OUT_OF_LINE))


def run(program: Path) -> str:
    # PyTorch keeps what it allocates at its loading for good.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def kernels() -> list[Path]:
    """Returns the object files of the dot-product kernels of every instruction set."""
    processor = Path("/proc/cpuinfo").read_text().split()
    found = []
    for source in sorted(SOURCES.glob("dot_*.cpp")):
        if source.name == "dot_kernels.cpp":
            continue
        runs = source.stem not in FLAGS or FLAGS[source.stem] in processor
        arguments = [*OPTIONS, *(checks() if runs else ()), "-c", source]
        headers = [path for path in SOURCES.iterdir() if path.suffix == ".h"]
        found.append((runs, compiled.build(f"{source.stem}.o", arguments, [source, *headers])))
    # Of what several define, the linker takes the first: one with checks.
    return [path for _, path in sorted(found, key=lambda one: not one[0])]


def test_kernels_stay_within_their_memory(kernels: list[Path]) -> None:
    """Runs the kernels alone, without PyTorch."""
    check = HERE / "dot_products_check.cpp"
    program = compiled.build(
        "kernel_check", [*OPTIONS, *checks(), check, *kernels], [SOURCES, check, HERE / "fuzzed_tensors.h"]
    )
    output = run(program)
    assert "portable: " in output and "products as expected" in output


def test_layers_stay_within_their_memory(kernels: list[Path]) -> None:
    """Runs the operator as a whole: rounding of the input, chunks, tiles, results."""
    # Files with PyTorch's headers are compiled together: the headers take longer than all the rest.
    together = [SOURCES / "quantize_rows.cpp", SOURCES / "quantized_linear.cpp", HERE / "quantized_linear_check.cpp"]
    included = [part for path in together for part in ("-include", path)]
    sources = [SOURCES / "dot_kernels.cpp", SOURCES / "isa.cpp"]
    joined = compiled.build(
        "together.o", [*OPTIONS, *checks(), *compiled.TORCH_INCLUDES, *included, "-c", "-x", "c++", "/dev/null"],
        [SOURCES, HERE / "quantized_linear_check.cpp", HERE / "fuzzed_tensors.h"],
    )  # fmt: skip
    program = compiled.build(
        "layer_check",
        [*OPTIONS, *checks(), *compiled.TORCH_INCLUDES, *sources, joined, *kernels, *compiled.TORCH_LIBRARIES],
        [SOURCES, HERE / "quantized_linear_check.cpp", HERE / "fuzzed_tensors.h"],
    )
    output = run(program)
    assert "portable: " in output and "layers as expected" in output
