"""Tests how the version of the installed vLLM is read, and how versions compare with ranges."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream import in_range, installed_version, is_beyond
from vllm_patchbay.upstream.versions import declared_version


@pytest.fixture(autouse=True)
def _no_override(monkeypatch):
    monkeypatch.delenv("VLLM_VERSION", raising=False)


def test_it_is_the_version_that_vllm_declares():
    spec = find_spec("vllm")
    declared = runpy.run_path(str(Path(spec.origin).with_name("_version.py")))
    assert installed_version() == Version(declared["__version__"])


@pytest.mark.process
def test_vllm_is_not_imported():
    program = (
        "import sys; from vllm_patchbay.upstream import installed_version, installed_tree, SymbolIndex\n"
        "installed_version(); SymbolIndex(installed_tree()).resolve('vllm.config', 'VllmConfig')\n"
        "print({'vllm', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_variable_overrides(monkeypatch):
    monkeypatch.setenv("VLLM_VERSION", "0.33.0.dev7+g12345")
    assert installed_version() == Version("0.33.0.dev7+g12345")


@pytest.mark.parametrize("nonsense", ["main", "0.32.x", "v0..1"])
def test_a_nonsensical_override_is_an_error_that_names_it(monkeypatch, nonsense):
    monkeypatch.setenv("VLLM_VERSION", nonsense)
    with pytest.raises(PatchbayError, match="VLLM_VERSION") as caught:
        installed_version()
    assert nonsense in str(caught.value)


def other_vllm(folder, files: dict[str, str]) -> str:
    """Returns the version, or the error, in a new Python process that finds the vLLM in `folder` first."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    program = (
        "from vllm_patchbay.errors import PatchbayError\n"
        "from vllm_patchbay.upstream import installed_version\n"
        "try:\n    print(installed_version())\n"
        "except PatchbayError as fault:\n    print('error:', fault)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.strip()


@pytest.mark.process
def test_a_local_build_is_read_from_its_own_file(tmp_path):
    files = {"vllm/__init__.py": "raise RuntimeError\n", "vllm/_version.py": "__version__ = version = '0.34.1+cpu'\n"}
    assert other_vllm(tmp_path, files) == "0.34.1+cpu"


@pytest.mark.process
def test_a_folder_that_only_has_the_name_is_not_taken(tmp_path):
    assert other_vllm(tmp_path, {"vllm/readme.txt": "not a package"}) == str(installed_version())


@pytest.mark.parametrize(
    ("version", "specifiers", "inside"),
    [
        ("0.32.0", ">=0.32,<0.33", True),
        ("0.32.1.dev3+g1234567", ">=0.32,<0.33", True),
        ("0.32.1rc2", ">=0.32,<0.33", True),
        ("0.32.0+cpu", "==0.32.0", True),
        ("0.32.0rc2.dev5+g1234567", ">=0.32,<0.33", True),
        ("0.32.0.dev1", ">=0.32,<0.33", True),
        ("0.32.0rc1", ">=0.32.0rc2", False),
        ("0.33.0.dev1", ">=0.32,<0.33", False),
        ("0.33.0rc1", ">=0.32,<0.33", False),
        ("0.33.0rc1", ">=0.33,<0.34", True),
        ("0.33.0", ">=0.32,<0.33", False),
        ("0.31.9", ">=0.32,<0.33", False),
        ("0.9.0", ">=0.10", False),
    ],
)
def test_ranges(version, specifiers, inside):
    assert in_range(version, specifiers) is inside
    assert in_range(Version(version), specifiers) is inside


@pytest.mark.parametrize(
    ("version", "specifiers", "beyond"),
    [
        ("0.33.0", ">=0.32,<0.33", True),
        ("0.33.0rc1", ">=0.32,<0.33", True),
        ("0.32.5", ">=0.32,<0.33", False),
        ("0.31.0", ">=0.32,<0.33", False),
        ("0.32.1", ">=0.30,<0.33,!=0.32.*", False),
        ("0.33.0", ">=0.30,<0.33,!=0.32.*", True),
        ("0.33.0", "==0.32.*", True),
        ("0.31.0", "==0.32.*", False),
        ("0.33.0", "~=0.32.0", True),
        ("0.31.0", "~=0.32.0", False),
        ("0.32.1", "<=0.32.0", True),
        ("9.0", ">=0.32", False),
    ],
)
def test_what_is_later_than_a_range(version, specifiers, beyond):
    assert is_beyond(version, specifiers) is beyond


def test_a_wrong_range_names_a_right_one():
    with pytest.raises(PatchbayError, match=r">=0\.32"):
        in_range("0.32.0", "newer than 0.32")


@pytest.mark.parametrize(
    ("source", "declared"),
    [
        ("__version__ = version = '1.2'\n", "1.2"),
        ("version = '1'\n__version__ = '2'\n", "2"),
        ("__version__ = compute()\n", ""),
        ("def broken(:\n", ""),
        ("", ""),
    ],
)
def test_a_generated_version_file(source, declared):
    assert declared_version(source) == declared
