"""Builds the C++ libraries of the devices; all other package metadata is in pyproject.toml.

The C++ code of a device is one shared library that registers its operators with PyTorch when it is loaded; it is not a
Python module. It is compiled against the torch of the environment that the package is installed into. pip's build
isolation hides that torch from imports, so it is found by path and never imported.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
# Each library with the folders of its sources. Include paths are relative to the folder below csrc.
LIBRARIES = {
    "vllm_backplane.devices.cpu.libbackplane_cpu": ("csrc/cpu",),
    "vllm_backplane.devices.sim.libbackplane_sim": ("csrc/sim/driver", "csrc/sim/runtime"),
}
# Files that are compiled as one: torch's headers take longer to parse than most files take to compile.
# Names in their anonymous namespaces must differ. Files with large loops are compiled alone, so that all cores work.
TOGETHER = {
    "cpu-graphs": ["csrc/cpu/graph_*.cpp"],
    "cpu-layers": [
        *("csrc/cpu/attention.cpp", "csrc/cpu/kv_cache.cpp", "csrc/cpu/moe.cpp", "csrc/cpu/moe_route.cpp"),
        *(
            "csrc/cpu/quantize_rows.cpp",
            "csrc/cpu/quantized_linear.cpp",
            "csrc/cpu/roofline.cpp",
            "csrc/cpu/rotary.cpp",
        ),
    ],
    "cpu-tokens": [
        *("csrc/cpu/allowed_tokens.cpp", "csrc/cpu/penalties.cpp", "csrc/cpu/random_draw.cpp"),
        *("csrc/cpu/sampling.cpp", "csrc/cpu/slot_mapping.cpp", "csrc/cpu/value_statistics.cpp"),
    ],
    "sim-driver": ["csrc/sim/driver/*.cpp"],
    "sim-runtime": ["csrc/sim/runtime/*.cpp"],
}
SWITCH = "BACKPLANE_BUILD_KERNELS"
WITHOUT = f"or set {SWITCH}=0 to install without kernels"

# No -march: one library serves every processor of the architecture, and kernels select instructions at run time.
COMPILE = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-DNDEBUG"]
COMPILE += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi", "-Werror=return-type"]


class BuildError(SystemExit):
    def __init__(self, message: str) -> None:
        super().__init__(f"\nvllm-backplane: {message}\n")


class Torch:
    """Describes the files of an installed torch, which is never imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.libraries = folder / "lib"
        self.includes = [folder / "include", folder / "include/torch/csrc/api/include"]
        version = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", (folder / "version.py").read_text())
        self.version = version[1] if version else "unknown"

    @classmethod
    def find(cls) -> Torch:
        """Returns the torch of the target environment. Raises `BuildError` if there is none."""
        visible = importlib.util.find_spec("torch")
        candidates = list(visible.submodule_search_locations or []) if visible else []
        places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
        candidates += [os.path.join(place, "torch") for place in places]
        for candidate in candidates:
            if Path(candidate, "include/ATen/ATen.h").is_file() and Path(candidate, "version.py").is_file():
                return cls(Path(candidate))
        raise BuildError(
            f"no torch found for {sys.executable} (looked in {', '.join(dict.fromkeys(candidates))}).\n"
            "The kernels are compiled against the torch that they run with. Install vLLM first, which depends on "
            "torch; with an installer that builds in a separate environment, add --no-build-isolation; "
            f"{WITHOUT}."
        )

    def string_abi(self) -> int:
        """Returns the value of _GLIBCXX_USE_CXX11_ABI that torch was built with, derived from its symbols."""
        return int(b"NSt7__cxx1112basic_string" in (self.libraries / "libc10.so").read_bytes())

    def openmp(self) -> list[str]:
        """Returns the linker arguments for torch's own OpenMP runtime; a second runtime would have its own threads."""
        for folder in (self.libraries, self.folder.parent / "torch.libs"):
            found = sorted(folder.glob("libgomp*.so*"))
            if found:
                return [str(found[0])]
        return ["-fopenmp"]


def compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"CXX is {chosen[0]!r}, which is not on PATH. Correct it, {WITHOUT}.")
        return chosen
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError(f"no C++ compiler found. Install g++ (package 'g++' or 'gcc-c++'), {WITHOUT}.")


def make(result: Path, command: list[str], inputs: list[Path], what: str) -> None:
    """Runs `command`, whose last argument is `result`, unless `result` is newer than all inputs.

    A changed command also counts as a change.
    """
    record = result.with_suffix(result.suffix + ".command")
    if result.is_file() and record.is_file() and record.read_text() == shlex.join(command):
        made = result.stat().st_mtime_ns
        if all(path.exists() and path.stat().st_mtime_ns <= made for path in inputs):
            return
    print(f"  {what}", flush=True)
    # The result is written under another name and then renamed, because a second build may be reading the old file.
    partial = result.with_name(f"{result.name}.{os.getpid()}")
    started = time.time_ns()
    done = subprocess.run(
        [*command[:-1], str(partial)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{what} failed:\n{shlex.join(command)}\n{done.stdout}")
    if done.stdout:
        print(done.stdout, flush=True)
    # The result gets the time at which the compiler started: a source saved during the compilation must count as newer.
    os.utime(partial, ns=(started, started))
    partial.replace(result)
    record.write_text(shlex.join(command))


def headers_of(rules: Path) -> list[Path]:
    """Returns the files that an object depends on, from the compiler's dependency file, without system headers."""
    if not rules.is_file():
        return [rules]
    _, _, listed = rules.read_text().replace("\\\n", " ").partition(": ")
    return [ROOT / name for name in listed.split()]


def translation_units(sources: list[str], folder: Path) -> dict[str, Path]:
    """Returns what the compiler gets, by the name of the object: a source, or a file that includes several."""
    left, units = list(sources), {}
    for name, patterns in TOGETHER.items():
        together = [source for source in left if any(fnmatch.fnmatchcase(source, each) for each in patterns)]
        if not together:
            continue
        unit = folder / f"{name}.cpp"
        text = "".join(f'#include "{ROOT / source}"\n' for source in together)
        if not unit.is_file() or unit.read_text() != text:
            unit.write_text(text)
        units[name] = unit
        left = [source for source in left if source not in together]
    alone = {source.removeprefix("csrc/").replace("/", "-").removesuffix(".cpp"): ROOT / source for source in left}
    return units | alone


def includes_torch(unit: Path, seen: set[Path] | None = None) -> bool:
    """Returns whether a file includes a header of torch, itself or through our headers."""
    seen = set() if seen is None else seen
    if unit in seen or not unit.is_file():
        return False
    seen.add(unit)
    text = unit.read_text()
    if re.search(r"#include <(torch|ATen)/", text):
        return True
    ours = re.findall(r'#include "(.+)"', text)
    return any(includes_torch(folder / name, seen) for name in ours for folder in (unit.parent, unit.parent.parent))


def precompile_torch(cxx: list[str], flags: list[str], header: Path) -> Path:
    """Precompiles torch's headers with GCC, for all files that include them, and returns the path of the result."""
    about = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout
    result = header.with_suffix(".h.gch")  # the path at which GCC looks for it
    if "Free Software Foundation" in about:
        command = [*cxx, *flags, "-x", "c++-header", str(header), "-o", str(result)]
        make(result, command, [header], "precompiling torch's headers")
    return result


def state_torch(cxx: list[str], flags: list[str], objects: Path, torch: Torch) -> Path:
    """Compiles a text with torch's version. device/torch_version.py reads it before it loads a library."""
    unit, result = objects / "built_for.cpp", objects / "built_for.o"
    if not unit.is_file():
        text = f"vllm-backplane: built for PyTorch {torch.version};"
        unit.write_text(f'__attribute__((used)) static const char built_for[] = "{text}";\n')
    make(result, [*cxx, *flags, "-c", str(unit), "-o", str(result)], [unit], "stating torch's version")
    return result


class BuildKernels(build_ext):
    """Compiles changed files, in a build folder that is kept between builds, unlike pip's temporary folders."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extensions(self) -> None:
        cxx, torch = compiler(), Torch.find()
        flags = [*COMPILE, f"-D_GLIBCXX_USE_CXX11_ABI={torch.string_abi()}"]
        for folder in torch.includes:
            flags += ["-isystem", str(folder)]
        flags += shlex.split(os.environ.get("CXXFLAGS", ""))
        # There is one folder per torch, compiler and platform, because several environments may share a checkout.
        key = hashlib.sha256(shlex.join([*cxx, *flags, torch.version]).encode()).hexdigest()[:12]
        objects = ROOT / "build" / f"kernels-{sysconfig.get_platform()}-{key}"
        objects.mkdir(parents=True, exist_ok=True)
        header = objects / "torch_headers.h"
        if not header.is_file():
            header.write_text("#include <torch/library.h>\n")
        whole = not any(objects.glob("*.o"))

        def compile_one(name: str, unit: Path, includes: list[str]) -> Path:
            result = objects / f"{name}.o"
            rules = result.with_suffix(".d")
            first = ["-include", str(header)] if includes_torch(unit) else []
            if first and precompiled is not None:
                precompiled.result()
            command = [*cxx, *flags, *(f"-I{folder}" for folder in includes), *first, "-MMD", "-MF", str(rules)]
            make(result, [*command, "-c", str(unit), "-o", str(result)], headers_of(rules), f"compiling {name}")
            return result

        work = []
        for ext in self.extensions:
            with_what = f"torch {torch.version} with {shlex.join(cxx)}"
            print(f"{ext.name.rpartition('.')[2]}: {len(ext.sources)} files for {with_what}", flush=True)
            work += [(ext, name, unit) for name, unit in translation_units(ext.sources, objects).items()]
        # While one core precompiles torch's headers, others compile what does not include them. Groups take longest.
        work.sort(key=lambda each: (includes_torch(each[2]), each[1] not in TOGETHER))
        results: dict[str, list[Path]] = {ext.name: [] for ext in self.extensions}
        with ThreadPoolExecutor(self.parallel or os.cpu_count() or 1) as pool:
            precompiled = pool.submit(precompile_torch, cxx, flags, header) if whole else None
            compiled = [pool.submit(compile_one, name, unit, ext.include_dirs) for ext, name, unit in work]
            for (ext, _, _), each in zip(work, compiled, strict=True):
                results[ext.name].append(each.result())
        if precompiled is not None:
            precompiled.result().unlink(missing_ok=True)  # it is large, and later builds compile only few files
        stated = state_torch(cxx, flags, objects, torch)
        for ext in self.extensions:
            self.link(ext, [*results[ext.name], stated], objects, cxx, torch)

    def link(self, ext: Extension, results: list[Path], objects: Path, cxx: list[str], torch: Torch) -> None:
        library = objects / Path(self.get_ext_filename(ext.name)).name
        link = [*cxx, "-shared", "-Wl,--no-undefined", *map(str, results), f"-L{torch.libraries}"]
        link += ["-ltorch", "-ltorch_cpu", "-lc10", *torch.openmp(), "-o", str(library)]
        make(library, link, results, f"linking {library.name}")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # The file is replaced and not overwritten, because a process may have mapped the old one.
        target.unlink(missing_ok=True)
        shutil.copy2(library, target)


def extensions() -> list[Extension]:
    switch = os.environ.get(SWITCH, "1").strip().lower()
    if switch in ("0", "false", "no", "off"):
        print(f"{SWITCH}={switch}: no kernels are built; operators run their references", flush=True)
        return []
    found = []
    for library, folders in LIBRARIES.items():
        sources = files(folders, "*.cpp")
        if not sources:
            raise BuildError(
                f"no C++ files in {', '.join(folders)}: the source tree is incomplete. Download it again, {WITHOUT}."
            )
        includes = ["/".join(folders[0].split("/")[:2])]
        headers = files(folders, "*.h")
        found.append(Extension(library, sources, depends=headers, include_dirs=includes, language="c++"))
    return found


def files(folders: tuple[str, ...], pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).glob(pattern))


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
