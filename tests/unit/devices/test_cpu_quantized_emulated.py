"""Tests the C++ kernels of quantized linear layers for other ARM processors than this machine's, under an emulator."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import compiled

pytestmark = [pytest.mark.compiler, pytest.mark.exhaustive]

HERE = Path(__file__).resolve().parent
SOURCES = compiled.ROOT / "csrc" / "cpu"
SETS = ("i8mm", "dotprod", "neon", "portable")
ON_ARM = platform.machine() == "aarch64"


@pytest.fixture(scope="module")
def program() -> Path:
    command = compiled.compiler() if ON_ARM else (shutil.which("aarch64-linux-gnu-g++"),)
    if command[0] is None:
        pytest.skip("no C++ compiler for ARM: install g++-aarch64-linux-gnu (on ARM g++)")
    kernels = sorted(file for file in SOURCES.glob("dot_*.cpp") if file.name != "dot_kernels.cpp")
    # Static, so that the emulator needs no libraries of the other machine.
    options = ["-std=c++20", "-O2", "-Wno-psabi", "-static", f"-I{SOURCES}"]
    check = HERE / "dot_products_check.cpp"
    return compiled.build("emulated_check", [*options, check, *kernels], [SOURCES, check], command)


def as_processor(name: str, runs: int) -> list[str]:
    """Returns the words before a program that make it run on the given processor: none if this machine has its
    instructions."""
    features = Path("/proc/cpuinfo").read_text().split() if ON_ARM else []
    if runs == len(SETS) and "i8mm" in features:
        return []
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip(f"this machine is no {name}, and qemu-aarch64 is not here: install qemu-user or qemu-user-static")
    return [emulator, "-cpu", name]


@pytest.mark.parametrize(("processor", "runs"), [("max", 4), ("neoverse-n1", 3), ("cortex-a72", 2)])
def test_products_of_a_processor_are_right_and_no_others_run(
    request: pytest.FixtureRequest, processor: str, runs: int
) -> None:
    """An instruction that the emulated processor lacks would end the program."""
    emulator = as_processor(processor, runs)  # before the program is compiled for nothing
    command = [*emulator, str(request.getfixturevalue("program"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    printed = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    lacking = len(SETS) - runs
    assert {name: printed[name] for name in SETS[:lacking]} == dict.fromkeys(SETS[:lacking], "not on this machine")
    assert all(printed[name].endswith("products as expected") for name in SETS[lacking:])
