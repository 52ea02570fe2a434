"""Checks the layout: a folder imports folders of lower levels only, and `ops/`, `device/` and others import no vLLM."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_backplane
import vllm_patchbay
from vllm_backplane.device import discover

PACKAGE = Path(vllm_backplane.__file__).parent
PATCHBAY = Path(vllm_patchbay.__file__).parent

LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("guards", "name_patterns", "platform_choice", "private_folder", "safe_text"),
    ("distributed", "http", "io_processors", "models", "peering", "settings"),
    ("device", "own_options"),
    ("host", "ops", "process", "runtime"),
    ("attention", "devices", "gguf", "kv_offload", "metrics", "start_display"),
    ("added_models", "early_checks", "layers"),
    ("quantization",),
    ("patches", "weights"),
    ("config",),
    ("lora", "page", "runner"),
    ("binding", "worker"),
    ("bench", "chat", "doctor", "platform", "plugin"),
    ("cli",),
)
"""The folders and top-level modules of the package by level, lowest first. Each imports lower levels only."""

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "internals" / "architecture.md"


def test_the_architecture_page_has_the_same_levels() -> None:
    levels: list[set[str]] = []
    for number, names in re.findall(r"^\| +(\d*) +\| ([^|]+) \|", ARCHITECTURE.read_text(), re.MULTILINE):
        if number:
            levels.append(set())
        levels[-1] |= {name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", names)}
    assert levels == [{"vllm_patchbay"}, *map(set, LEVELS)]


FREE_OF_VLLM = (
    "chat",
    "added_models",
    "ops",
    "device",
    "devices",
    "early_checks",
    "gguf",
    "host",
    "http",
    "metrics/entry_point.py",
    "metrics/folder.py",
    "metrics/series.py",
    "metrics/steps.py",
    "metrics/values_file.py",
    "models",
    "peering",
    "errors.py",
    "guards.py",
    "name_patterns.py",
    "own_options.py",
    "private_folder.py",
    "process/owned_process.py",
    "runtime.py",
    "safe_text.py",
    "start_display",
    "settings/options.py",
    "settings/explicit_arguments.py",
    "settings/releases.py",
)
OPEN_TO_DEVICES = ("device", "devices", "host", "ops", "settings.options", "errors")


def files(*parts: str) -> list[Path]:
    found = [
        path for part in parts for path in ((PACKAGE / part).rglob("*.py") if part[-3:] != ".py" else [PACKAGE / part])
    ]
    assert found
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imports(path: Path) -> Iterator[str]:
    """Yields the full names of the modules that a file imports, also inside functions. ``from a import b`` counts as
    ``a.b``."""
    root = PATCHBAY if path.is_relative_to(PATCHBAY) else PACKAGE
    package = [root.name if root is PATCHBAY else "vllm_backplane", *path.relative_to(root).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def is_vllm(module: str) -> bool:
    return module.split(".")[0] == "vllm"


IMPORTED_WITHOUT_VLLM = (
    "vllm_backplane",
    "vllm_backplane.device",
    "vllm_backplane.ops",
    "vllm_backplane.settings.options",
    "vllm_backplane.runtime",
    "vllm_backplane.devices.cpu",
    "vllm_backplane.devices.sim",
    "vllm_backplane.cli",
    "vllm_backplane.doctor",
    "vllm_backplane.binding.operator_callers",
)


@pytest.fixture(scope="module")
def brought_along() -> dict[str, list[str]]:
    """Returns the modules of vLLM that each import loads, in order. All run in one process: torch takes seconds."""
    program = (
        "import importlib, json, sys\n"
        "found, before = {}, set()\n"
        f"for module in {IMPORTED_WITHOUT_VLLM!r}:\n"
        "    importlib.import_module(module)\n"
        "    now = {name for name in sys.modules if name == 'vllm' or name.startswith('vllm.')}\n"
        "    found[module], before = sorted(now - before), now\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.process
@pytest.mark.parametrize("module", IMPORTED_WITHOUT_VLLM)
def test_importing_it_does_not_import_vllm(brought_along, module):
    assert brought_along[module] == []


@pytest.mark.parametrize("path", files(*FREE_OF_VLLM), ids=relative)
def test_it_imports_nothing_of_vllm_anywhere(path):
    assert [module for module in imports(path) if is_vllm(module)] == []


@pytest.mark.parametrize("path", files("devices"), ids=relative)
def test_a_device_imports_what_a_vendors_wheel_could(path):
    """A device imports the contract, and no file of another device."""
    here = path.relative_to(PACKAGE).parts
    allowed = tuple(f"vllm_backplane.{name}." for name in OPEN_TO_DEVICES)
    for module in imports(path):
        if module.split(".")[0] != "vllm_backplane":
            continue
        assert f"{module}.".startswith(allowed) or module == "vllm_backplane.ops", f"{relative(path)} imports {module}"
        if module.startswith("vllm_backplane.devices.") and len(here) > 2:
            assert module.split(".")[2] == here[1], f"{relative(path)} imports {module}"


def folder(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_folder_has_a_level():
    found = {folder(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert found == {name for level in LEVELS for name in level}


@pytest.mark.parametrize("path", [path for path in PACKAGE.rglob("*.py") if folder(path) != "__init__"], ids=relative)
def test_a_folder_imports_lower_levels_only(path):
    """Imports inside functions count too."""
    levels = {name: number for number, level in enumerate(LEVELS) for name in level}
    here = folder(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "vllm_backplane" and len(parts) > 1 and parts[1] in levels and parts[1] != here:
            assert levels[parts[1]] < levels[here], f"{relative(path)} imports {module}"


def imported_files(path: Path, package: Path) -> set[Path]:
    """Returns the files of a package that a file imports when it is itself imported or checked by a type checker. A
    name of a folder is in its `__init__.py`."""
    found = set()
    for module in imports(path):
        parts = module.split(".")
        if parts[0] != package.name or len(parts) == 1:
            continue
        for length in (len(parts), len(parts) - 1):
            place = package.joinpath(*parts[1:length])
            file = next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()), None)
            if file is not None and place != package:
                found.add(file)
                break
    return found - {path}


@pytest.mark.parametrize("package", [PACKAGE, PATCHBAY], ids=["backplane", "patchbay"])
def test_no_files_import_each_other_in_a_circle(package):
    edges = {path: imported_files(path, package) for path in package.rglob("*.py")}
    done: set[Path] = set()
    while free := [path for path, below in edges.items() if path not in done and below <= done]:
        done.update(free)
    assert sorted(str(path.relative_to(package)) for path in edges.keys() - done) == []


LEVELS_OF_PATCHBAY = {"errors": 0, "upstream": 1, "audit": 2, "patch": 2, "upgrade": 3, "cli": 4, "__main__": 5}


def test_a_folder_of_patchbay_imports_lower_levels_only():
    own = [path for path in PATCHBAY.rglob("*.py") if path.relative_to(PATCHBAY).parts[0] != "__init__.py"]
    assert {path.relative_to(PATCHBAY).parts[0].removesuffix(".py") for path in own} == set(LEVELS_OF_PATCHBAY)
    for path in own:
        here = path.relative_to(PATCHBAY).parts[0].removesuffix(".py")
        for file in imported_files(path, PATCHBAY):
            there = file.relative_to(PATCHBAY).parts[0].removesuffix(".py")
            assert there == here or LEVELS_OF_PATCHBAY[there] < LEVELS_OF_PATCHBAY[here], f"{path} imports {file}"


def test_patchbay_imports_packaging_and_nothing_else():
    """Patchbay must install beside any plugin, and read any vLLM without importing it."""
    allowed = {*sys.stdlib_module_names, "packaging", "vllm_patchbay"}
    found = [
        f"{path.relative_to(PATCHBAY)}: {module}"
        for path in PATCHBAY.rglob("*.py")
        for module in imports(path)
        if module.split(".")[0] not in allowed
    ]
    assert found == []


def test_the_compiled_kernels_of_vllm_are_imported_nowhere():
    found = [
        f"{relative(path)}: {module}"
        for path in PACKAGE.rglob("*.py")
        for module in imports(path)
        if is_vllm(module) and any(part.startswith(("_C", "_moe_C", "_custom_ops")) for part in module.split("."))
    ]
    assert found == []


def compared_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the string constants on either side of a comparison, in lists to compare with, and in match patterns."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.lineno, inner.value


OTHER_MEANINGS = {
    "doctor/plugins.py": 'target.lower() == "cpu"',
    "runner/triton_replacements.py": 'addresses.device.type != "cpu"',
}
"""Comparisons with 'cpu' that are not about our device: a value that vLLM treats specially, and torch's word for host
memory. Each file contains exactly one, with this text."""


def test_no_device_is_known_by_name_outside_its_folder():
    names = {"cpu", "sim", "triton", "cuda", *discover()}
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] != "devices":
            lines = path.read_text().splitlines()
            compared = [lines[line - 1].strip() for line, value in compared_strings(path) if value in names]
            if compared:
                found[relative(path)] = compared
    assert {name: len(lines) for name, lines in found.items()} == dict.fromkeys(OTHER_MEANINGS, 1), found
    for name, [line] in found.items():
        assert OTHER_MEANINGS[name] in line


def test_the_checks_see_what_they_look_for(tmp_path, monkeypatch):
    source = tmp_path / "devices" / "npu" / "file.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "from . import other\nfrom ..cpu import native\nfrom vllm import envs\n"
        "def f(device):\n    import vllm._C\n    if device.name in ('npu', 'sim'):\n        return 1\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert list(imports(source)) == [
        "vllm_backplane.devices.npu.other",
        "vllm_backplane.devices.cpu.native",
        "vllm.envs",
        "vllm._C",
    ]
    assert [value for _, value in compared_strings(source)] == ["npu", "sim"]
