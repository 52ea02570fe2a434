"""Checks the CPU kernels of x86-64 on a machine that is not one: cross-compiled, and run under an emulator.

    apt-get install g++-x86-64-linux-gnu qemu-user unzip
    python tests/emulated/x86.py FOLDER          # FOLDER keeps 2 GB: PyTorch's wheel, objects, recorded calls

The calls of tests/unit/devices/compare_cpu_kernels.py (but those with 8-bit floats, of several threads, and those that
are refused) are recorded here, with the references' results, and made again by the x86-64 library: with instructions
of every x86-64 processor, with AVX2, and with what a processor without AVX2 is given when it may choose (an instruction
that it lacks would end the program). The emulator knows no AVX-512 and no AMX.
A quarter of an hour on two cores. Not part of `make test`: it downloads half a gigabyte.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMPILER, EMULATOR = "x86_64-linux-gnu-g++", "qemu-x86_64"
SYSTEM = Path("/usr/x86_64-linux-gnu")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_25_x86_64", "manylinux_2_17_x86_64")
RUNS = (
    ("any x86-64", ["-cpu", "max"], ["0"]),
    ("AVX2", ["-cpu", "max"], ["1"]),
    ("a processor without AVX2, its own choice", ["-cpu", "Nehalem"], []),
)


def run(command: list[str], **options: Any) -> None:
    done = subprocess.run(command, **options)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:6])} ... ended with {done.returncode}")


def fetch(folder: Path) -> Path:
    """PyTorch for x86-64, and what its wheel on PyPI is linked with: unpacked, not installed."""
    import torch

    wheels, unpacked = folder / "wheels", folder / "unpacked"
    version = torch.__version__.partition("+")[0]
    wanted = [f"torch=={version}", "nvidia-cuda-runtime>=13", "nvidia-cuda-cupti>=13"]
    if not any(wheels.glob("torch-*")):
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        options = ["--no-deps", "--only-binary=:all:", "--python-version", python, *platforms, "-d", str(wheels)]
        run([sys.executable, "-m", "pip", "download", "-q", *options, *wanted])
    if not unpacked.is_dir():
        for wheel in wheels.glob("*.whl"):
            parts = ["torch/include/*", "torch/lib/lib*"] if wheel.name.startswith("torch-") else ["*"]
            run(["unzip", "-q", "-o", str(wheel), *parts, "-d", str(unpacked)])
    return unpacked


def is_newer(part: Path, made: Path) -> bool:
    return not part.exists() or part.stat().st_mtime > made.stat().st_mtime


def compile_all(folder: Path, unpacked: Path) -> tuple[Path, Path]:
    """The library and the program, anew where a source is newer."""
    includes = unpacked / "torch/include"
    flags = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-DNDEBUG", "-Wno-psabi"]
    flags += [f"-I{ROOT / 'csrc/cpu'}", "-isystem", str(includes), "-isystem", str(includes / "torch/csrc/api/include")]
    libraries = unpacked / "torch/lib"
    link = [f"-L{libraries}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", str(libraries / "libgomp.so.1"), "-ldl"]
    link += ["-Wl,--allow-shlib-undefined", f"-Wl,-rpath-link,{unpacked / 'nvidia/cu13/lib'}"]
    objects = folder / "objects"
    objects.mkdir(exist_ok=True)

    def one(source: Path) -> Path:
        made, rules = objects / f"{source.stem}.o", objects / f"{source.stem}.d"
        # What the compiler said the object is made of.
        parts = rules.read_text().replace("\\\n", " ").partition(": ")[2].split() if made.is_file() else []
        if not parts or any(is_newer(Path(part), made) for part in parts):
            print(f"compiling {source.name}", flush=True)
            run([COMPILER, *flags, "-MMD", "-MF", str(rules), "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(one, sorted((ROOT / "csrc/cpu").glob("*.cpp"))))
    library, program = folder / "libbackplane_cpu.so", folder / "replay_calls"
    run([COMPILER, "-shared", *map(str, made), *link, "-o", str(library)])
    run([COMPILER, *flags, str(HERE / "replay_calls.cpp"), *link, "-o", str(program)])
    return library, program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    missing = [name for name in (COMPILER, EMULATOR, "unzip") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not found: apt-get install g++-x86-64-linux-gnu qemu-user unzip")
    calls = folder / "calls"
    calls.mkdir(parents=True, exist_ok=True)
    unpacked = fetch(folder)
    library, program = compile_all(folder, unpacked)
    for old in calls.iterdir():
        old.unlink()
    run([sys.executable, "-W", "ignore", str(HERE / "record_calls.py"), str(calls)], stderr=subprocess.DEVNULL)
    places = ":".join(map(str, (unpacked / "torch/lib", unpacked / "nvidia/cu13/lib", SYSTEM / "lib")))
    for name, processor, isa in RUNS:
        print(f"{name}:", flush=True)
        emulated = [EMULATOR, *processor, "-L", str(SYSTEM), "-E", f"LD_LIBRARY_PATH={places}"]
        run(
            [*emulated, str(program), str(library), str(calls), *isa],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main()
