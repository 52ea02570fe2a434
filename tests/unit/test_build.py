"""Tests what is built and installed: contents of wheels and source distributions, the switch that leaves kernels out,
the errors of a build, and which steps make repeats.

Nothing is compiled here: the kernels were, by `make`, and a build takes what has not changed.
"""

from __future__ import annotations

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vllm_backplane
import vllm_patchbay
from vllm_backplane.settings.releases import NEWEST, RELEASES

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_backplane"
LIBRARIES = {"vllm_backplane/devices/cpu/libbackplane_cpu.so", "vllm_backplane/devices/sim/libbackplane_sim.so"}
SWITCH = "BACKPLANE_BUILD_KERNELS"


def environment(**changes: str | None) -> dict[str, str]:
    """Returns the environment without variables of an outer make or of the user that concern builds."""
    removed = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEFILES", SWITCH)
    result = {name: value for name, value in os.environ.items() if name not in removed}
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def setup(*arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        cwd=ROOT,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@dataclass(frozen=True)
class Wheel:
    path: Path
    output: str

    @property
    def files(self) -> set[str]:
        with zipfile.ZipFile(self.path) as archive:
            return {name for name in archive.namelist() if not name.endswith("/")}

    def described(self, name: str) -> str:
        with zipfile.ZipFile(self.path) as archive:
            [found] = [each for each in archive.namelist() if each.endswith(f".dist-info/{name}")]
            return archive.read(found).decode()


def wheel(folder: Path, **changes: str | None) -> Wheel:
    """Returns a wheel that is built from the repository, with everything that builds leave behind elsewhere."""
    elsewhere = ["egg_info", "--egg-base", str(folder), "build", "--build-base", str(folder / "build")]
    done = setup(*elsewhere, "bdist_wheel", "--bdist-dir", str(folder / "tree"), "--dist-dir", str(folder), **changes)
    assert done.returncode == 0, done.stdout
    [path] = folder.glob("*.whl")
    return Wheel(path, done.stdout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    if not all((ROOT / library).exists() for library in LIBRARIES):
        pytest.skip("the kernels were not built in this tree, which would take minutes")
    return wheel(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def without_kernels(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return wheel(tmp_path_factory.mktemp("without"), **{SWITCH: "0", "CXX": "no-such-compiler"})


@pytest.fixture(scope="module")
def patchbay(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    folder = tmp_path_factory.mktemp("patchbay")
    shutil.copytree(ROOT / "patchbay", folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", ".", "./source"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    return Wheel(path, done.stdout)


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("sdist")
    done = setup("egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder), "--formats", "gztar")
    assert done.returncode == 0, done.stdout
    return files_of_archive(folder)


@pytest.fixture(scope="module")
def source_distribution_of_patchbay(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("sdist_of_patchbay")
    make_one = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", make_one, str(folder)],
        cwd=ROOT / "patchbay",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return files_of_archive(folder)


def files_of_archive(folder: Path) -> set[str]:
    """Returns the files of the archive in the folder, without their common folder and the records of setuptools."""
    [path] = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()]
    return {name for name in names if ".egg-info/" not in name}


def files_below(folder: Path) -> set[str]:
    found = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return {path.relative_to(folder).as_posix() for path in found if path.suffix not in (".so", ".o")}


def sources() -> set[str]:
    return {f"{PACKAGE.name}/{path}" for path in files_below(PACKAGE)}


def test_the_wheel_holds_every_file_and_both_libraries(whole: Wheel) -> None:
    in_package = {name for name in whole.files if ".dist-info/" not in name}
    assert in_package == sources() | LIBRARIES
    assert not whole.path.name.endswith("none-any.whl"), "it holds machine code"


def test_a_second_build_compiles_nothing(whole: Wheel) -> None:
    assert "libbackplane_cpu: " in whole.output, "the build prints what it does"
    assert "  compiling " not in whole.output and "linking lib" not in whole.output


def test_files_that_are_compiled_together_exist() -> None:
    assigned = {
        statement.targets[0].id: statement.value
        for statement in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    patterns = [node.value for node in ast.walk(assigned["TOGETHER"]) if isinstance(node, ast.Constant)]
    named = [pattern for pattern in patterns if str(pattern).endswith(".cpp")]
    assert len(named) >= 10
    assert not [pattern for pattern in named if not list(ROOT.glob(pattern))]


def test_the_wheel_names_neither_vllm_nor_torch(whole: Wheel) -> None:
    needed = email.message_from_string(whole.described("METADATA")).get_all("Requires-Dist") or []
    always = {line.split(";")[0].strip() for line in needed if "extra ==" not in line}
    assert {re.split(r"[<>=!~ ]", line)[0] for line in always} == {"gguf", "packaging", "psutil", "vllm-patchbay"}
    assert all(re.search(r"[<>=]", line) for line in always), "every requirement has a bound"
    [sister] = [Requirement(line) for line in needed if line.startswith("vllm-patchbay")]
    assert vllm_patchbay.__version__ in sister.specifier, "both are released together"
    [supported] = [Requirement(line) for line in needed if re.match(r"vllm\b(?!-)", line)]
    assert str(supported.marker) == 'extra == "vllm"'
    assert all(release.version in supported.specifier for release in RELEASES)
    major, minor, _ = map(int, NEWEST.version.split("."))
    assert f"{major}.{minor + 1}.0" not in supported.specifier


def test_both_distributions_have_their_metadata(whole: Wheel, patchbay: Wheel) -> None:
    assert vllm_backplane.__version__ == vllm_patchbay.__version__, "they are released together"
    for built, package in ((whole, vllm_backplane), (patchbay, vllm_patchbay)):
        described = email.message_from_string(built.described("METADATA"))
        assert described["Version"] == package.__version__
        assert described["License-Expression"] == "Apache-2.0"
        assert described["License-File"] == "LICENSE"
        assert set(described["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
        assert {line.split(",")[0] for line in described.get_all("Project-URL")} >= {"Homepage", "Issues", "Changelog"}
        assert "Typing :: Typed" in described.get_all("Classifier")
        assert any(name.endswith("/py.typed") for name in built.files)


def test_the_wheel_of_patchbay_is_pure_and_whole(patchbay: Wheel) -> None:
    assert patchbay.path.name.endswith("py3-none-any.whl")
    in_package = {name for name in patchbay.files if ".dist-info/" not in name}
    assert in_package == {f"vllm_patchbay/{path}" for path in files_below(ROOT / "patchbay" / "vllm_patchbay")}
    needed = email.message_from_string(patchbay.described("METADATA")).get_all("Requires-Dist")
    assert [line for line in needed or [] if "extra ==" not in line] == ["packaging>=23"]
    assert "vllm." not in patchbay.described("entry_points.txt").replace("vllm_patchbay.", "")


def test_the_source_distribution_holds_what_builds_the_wheel(source_distribution: set[str]) -> None:
    kernels = {f"csrc/{path}" for path in files_below(ROOT / "csrc") if not path.startswith("sim/tests/")}
    texts = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    assert source_distribution == sources() | kernels | texts | {"PKG-INFO", "setup.cfg"}


def test_the_source_distribution_of_patchbay_holds_what_builds_its_wheel(
    source_distribution_of_patchbay: set[str],
) -> None:
    package = {f"vllm_patchbay/{path}" for path in files_below(ROOT / "patchbay" / "vllm_patchbay")}
    texts = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    assert source_distribution_of_patchbay == package | texts | {"PKG-INFO", "setup.cfg"}


def test_the_wheel_declares_what_vllm_looks_for(whole: Wheel) -> None:
    declared = whole.described("entry_points.txt")
    for line in (
        "[vllm.platform_plugins]\nbackplane = vllm_backplane:register_platform",
        "[vllm.general_plugins]\nbackplane = vllm_backplane:register_general",
        "[vllm.endpoint_plugins]\nbackplane_page = vllm_backplane:register_page",
        "[vllm_backplane.devices]\ncpu = vllm_backplane.devices.cpu:CpuDevice\nsim = ",
        "[console_scripts]\nvllm-backplane = ",
    ):
        assert line in declared


WITHOUT = """
from collections import Counter
import vllm_backplane
from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.devices.sim import SimDevice
from vllm_backplane.ops import resolution

device = CpuDevice()
device.load_kernels()
table = resolution.resolve(device.dispatch_key, device.kernel_provider())
print(vllm_backplane.__file__)
print(dict(Counter(line.implementation for line in table)))
print(device.problems(), device.wants_graphs())
print(SimDevice.probe())
"""


def test_kernels_are_left_out_on_purpose(without_kernels: Wheel, tmp_path: Path) -> None:
    """The build looks for no compiler, and omits libraries that were built in the source tree."""
    assert f"{SWITCH}=0: no kernels are built; operators run their references" in without_kernels.output
    assert {name for name in without_kernels.files if ".dist-info/" not in name} == sources()
    assert without_kernels.path.name.endswith("none-any.whl")
    with zipfile.ZipFile(without_kernels.path) as archive:
        archive.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    place, table, problems, sim = done.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path)
    assert "'reference'" in table and "'kernel'" not in table
    assert "the CPU kernel library was not built" in problems and problems.endswith("False")
    assert "available=False" in sim and "was not built" in sim


@pytest.mark.parametrize(
    ("variables", "reported"),
    [
        (
            {"CXX": "no-such-compiler -m64"},
            "CXX is 'no-such-compiler', which is not on PATH. Correct it, or set",
        ),
        ({"CXX": None, "PATH": ""}, "no C++ compiler found. Install g++ (package 'g++' or 'gcc-c++'), or set"),
        ({"CXX": "", "PATH": "/nowhere"}, "no C++ compiler found. Install g++"),
    ],
)
def test_a_missing_compiler_is_reported_with_a_remedy(
    variables: dict[str, str | None], reported: str, tmp_path: Path
) -> None:
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    done = setup("build_ext", *folders, **variables)
    assert done.returncode != 0
    assert reported in done.stdout
    assert f"{SWITCH}=0 to install without kernels" in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.rglob("*.so"))


# --- make -----------------------------------------------------------------------------------------------------------


def make(folder: Path, *arguments: str) -> int:
    if shutil.which("make") is None:
        pytest.skip("no make")
    done = subprocess.run(
        ["make", "-C", str(folder), *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode


def up_to_date(folder: Path, target: str, *arguments: str) -> bool:
    return make(folder, "--question", target, *arguments) == 0


@pytest.mark.parametrize("target", ["runtime", "setup"])
@pytest.mark.parametrize(
    ("changed", "again"),
    [
        (None, set()),
        ("README.md", set()),
        ("vllm_backplane/platform.py", set()),
        ("csrc/cpu/norms.cpp", {"runtime", "setup"}),
        ("csrc/sim/driver", {"runtime", "setup"}),
        ("setup.py", {"runtime", "setup"}),
        ("pyproject.toml", {"runtime", "setup"}),
        ("patchbay/pyproject.toml", {"runtime", "setup"}),
    ],
)
def test_a_second_make_does_what_a_change_requires(
    target: str, changed: str | None, again: set[str], tmp_path: Path
) -> None:
    """Runs make in a copy whose steps are marked as done."""
    projects = ("pyproject.toml", "patchbay/pyproject.toml")
    for name in ("Makefile", "README.md", "setup.py", *projects, "vllm_backplane/platform.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / ".venv/.backplane").mkdir(parents=True)
    assert not up_to_date(tmp_path, target), "nothing was done yet"
    make(tmp_path, "--touch", "runtime", "setup")
    if changed is not None:
        newest = max(stamp.stat().st_mtime for stamp in (tmp_path / ".venv/.backplane").iterdir())
        os.utime(tmp_path / changed, (newest + 1, newest + 1))
    assert up_to_date(tmp_path, target) == (target not in again)


@pytest.mark.skipif("MAKELEVEL" not in os.environ, reason="make has not set this environment up just now")
@pytest.mark.parametrize("target", ["runtime", "setup"])
def test_nothing_is_left_to_do_in_this_environment(target: str) -> None:
    assert up_to_date(ROOT, target, f"VENV={sys.prefix}")
