"""Every program in benchmarks/ can be started by its path and as a module."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
PROGRAMS = sorted(file.stem for file in FOLDER.glob("*.py") if "\ndef main()" in file.read_text())


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes imported modules of the benchmarks for a test, and restores them afterwards."""
    before = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    for name in before:
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER.parent])
    yield
    for name in [name for name in sys.modules if _is_ours(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def _is_ours(name: str) -> bool:
    return name == "benchmarks" or name.startswith("benchmarks.")


def test_there_are_some() -> None:
    assert {"linear", "startup", "step"} <= set(PROGRAMS)


@pytest.mark.parametrize("way", ["by its path", "as a module"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_prints_its_help(
    program: str, way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = FOLDER / f"{program}.py"
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    by_path = way == "by its path"
    # Python puts the program's folder first on the path, or for a module the current folder.
    monkeypatch.syspath_prepend(str(FOLDER if by_path else FOLDER.parent))
    start = (
        partial(runpy.run_path, str(file))
        if by_path
        else partial(runpy.run_module, f"benchmarks.{program}", alter_sys=True)
    )
    with pytest.raises(SystemExit) as end:
        start(run_name="__main__")
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("usage:") and f"benchmarks.{program}" in output.replace("/", ".")
