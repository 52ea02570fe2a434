"""Tests the record of features: a test that passed enters it, and one that failed leaves it; also with pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import feature_matrix
import pytest
from feature_matrix import Shown

TESTS = """
import pytest

@pytest.mark.feature("Parallel: {way}", "{device}")
@pytest.mark.parametrize(("way", "device"), [("tensor", "cpu"), ("pipeline", "sim")])
def test_two(way, device): pass

@pytest.mark.feature("Format: AWQ", "cpu", "sim")
@pytest.mark.feature("KV cache: fp8", "cpu")
def test_passes(): pass

@pytest.mark.feature("Sleep: level 1", "sim", refused=True)
def test_refuses(): pass

@pytest.mark.feature("Format: compressed-tensors W8A16", "cpu")
def test_fails(): assert False

@pytest.fixture
def broken():
    yield
    assert False

@pytest.mark.feature("Serving: beam search", "cpu")
def test_ends_badly(broken): pass

@pytest.mark.feature("Serving: tool calls", "cpu")
def test_skipped(): pytest.skip("not today")
"""


HOOKS = "from feature_matrix import pytest_addoption, pytest_configure"
OTHER = "tests/unit/test_feature_matrix.py::test_passes_and_failures"


def run(
    folder: Path, record: Path, source: str, *arguments: str, file: str = "test_inner.py"
) -> subprocess.CompletedProcess[str]:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = feature: of a device\n")
    (folder / file).write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--features", str(record), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(feature_matrix.__file__).parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.process
@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_passes_and_failures(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    record = tmp_path / "features.json"
    stays = Shown("Format: AWQ", "cpu", OTHER, "0.1")
    before = [
        stays,
        Shown("Format: AWQ", "sim", "tests/unit/test_feature_matrix.py::test_that_is_gone", "0.1"),
        Shown("Format: compressed-tensors W8A16", "cpu", "test_inner.py::test_fails", "0.1"),
        Shown("KV cache: fp8", "cpu", "test_inner.py::test_passes", "0.1"),
        Shown("KV cache: fp8", "sim", "test_inner.py::test_passes", "0.1"),
    ]
    feature_matrix.write(record, before)
    done = run(tmp_path, record, TESTS, *arguments)
    assert "1 failed, 5 passed, 1 skipped, 1 error" in done.stdout, done.stdout + done.stderr
    found = feature_matrix.read(record)
    assert stays in found
    assert {entry.vllm for entry in found} == {"0.1", feature_matrix.vllm_version()}
    assert {entry[:3] for entry in found if entry != stays} == {
        ("Parallel: tensor", "cpu", "test_inner.py::test_two[tensor-cpu]"),
        ("Parallel: pipeline", "sim", "test_inner.py::test_two[pipeline-sim]"),
        ("Format: AWQ", "cpu", "test_inner.py::test_passes"),
        ("Format: AWQ", "sim", "test_inner.py::test_passes"),
        ("KV cache: fp8", "cpu", "test_inner.py::test_passes"),
        ("Sleep: level 1", "sim", "test_inner.py::test_refuses"),
    }
    assert {entry.test for entry in found if entry.refused} == {"test_inner.py::test_refuses"}


@pytest.mark.process
@pytest.mark.parametrize("arguments", [(), ("-n", "1"), ("-k", "passes")], ids=["", "another process", "chosen singly"])
def test_what_is_skipped_leaves_and_so_does_what_is_not_there(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Uses a file with the name of this one, because entries of files that do not exist are removed in any case."""
    record, file = tmp_path / "features.json", OTHER.partition("::")[0]
    gone = Shown("KV cache: fp8", "cpu", f"{OTHER}[a parameter of another day]", "0.1")
    elsewhere = Shown("KV cache: fp8", "cpu", "tests/unit/test_docs.py::test_every_linked_file_exists", "0.1")
    assert feature_matrix.exists(gone) and feature_matrix.exists(elsewhere)
    feature_matrix.write(record, [Shown("Format: AWQ", "cpu", OTHER, "0.1"), gone, elsewhere])
    skipped = 'import pytest\ndef test_passes_and_failures(): pytest.skip("not today")\n'
    done = run(tmp_path, record, skipped, *arguments, file=file)
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    assert set(feature_matrix.read(record)) == ({gone, elsewhere} if "-k" in arguments else {elsewhere})


@pytest.mark.process
@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        ('"Format: W8A61", "cpu"', "shows 'Format: W8A61', which features.toml does not list"),
        ('"Format: compressed-tensors W8A16"', "a feature is shown on one or more of cpu, sim"),
        ('"Format: compressed-tensors W8A16", "gpu"', "a feature is shown on one or more of cpu, sim"),
    ],
)
def test_a_mark_that_shows_no_listed_feature_or_device_is_an_error(tmp_path: Path, mark: str, complaint: str) -> None:
    source = f"import pytest\n@pytest.mark.feature({mark})\ndef test_it(): pass\n"
    done = run(tmp_path, tmp_path / "features.json", source)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert complaint in done.stdout + done.stderr


def test_a_cell_names_a_test_or_is_not_shown() -> None:
    entries = [
        Shown("KV cache: fp8", "sim", f"tests/e2e/test_kv_cache_fp8.py::test_fp8_stays_near_auto[{name}]", "0.32.0")
        for name in ("one", "two")
    ]
    rows, nowhere, releases = feature_matrix.page(entries)
    shown = "[test_kv_cache_fp8.py](tests/e2e/test_kv_cache_fp8.py): fp8 stays near auto, and 1 more"
    assert ("KV cache: fp8", "not shown", shown) in rows
    assert len(rows) == len(feature_matrix.listed()) == len(nowhere) + 1
    assert releases == ["0.32.0"]
    _, _, releases = feature_matrix.page([*entries, entries[0]._replace(vllm="0.31.0")])
    assert releases == ["0.31.0", "0.32.0"]


def test_a_cell_shows_that_a_device_refuses() -> None:
    test = "tests/e2e/test_kv_cache_fp8.py::test_fp8_stays_near_auto"
    refused = Shown("KV cache: fp8", "sim", test, "0.32.0", refused=True)
    shown = refused._replace(device="cpu", refused=False)
    link = "[test_kv_cache_fp8.py](tests/e2e/test_kv_cache_fp8.py): fp8 stays near auto"
    assert ("KV cache: fp8", link, f"refused: {link}") in feature_matrix.page([refused, shown])[0]
    assert ("KV cache: fp8", link, "not shown") in feature_matrix.page([refused._replace(device="cpu"), shown])[0]
