"""Tests the x86-64 CPU kernels on a machine with another processor: cross-compiled and run in an emulator.

    apt-get install g++-x86-64-linux-gnu qemu-user unzip
    python tests/emulated/x86.py FOLDER          # FOLDER keeps 2 GB: PyTorch's wheel, objects, recorded calls

This machine records the operator calls of tests/unit/devices/compare_cpu_kernels.py with the results of the references,
except calls with 8-bit floats, with several threads, and calls that raise. The x86-64 library then repeats them three
times: with baseline x86-64 instructions, with AVX2, and with the library's own choice on an emulated processor without
AVX2, where an unsupported instruction would end the program. The emulator has neither AVX-512 nor AMX.

It takes a quarter of an hour on two cores and downloads half a gigabyte, so it is a part of `make test-all` only.
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
    """Downloads and unpacks PyTorch for x86-64 and the libraries that its PyPI wheel is linked with."""
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
    """Compiles the library and the program; objects that are newer than their sources are kept."""
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
        # The compiler has written the dependencies of the object.
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
