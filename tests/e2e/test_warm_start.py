"""Tests that a child forked by tests/warm_start.py behaves like one that was started in the usual way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import WARM, Child, environment, on_path

from tests import programs, warm_start

pytestmark = pytest.mark.skipif(
    os.environ.get("OMP_NUM_THREADS") != "1",
    reason="warm_start.py forks only with OMP_NUM_THREADS=1, which `make test` sets",
)

PROGRAM = """
import json, os, random, signal, sys, tempfile
import beside

def opened():
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor of the listing itself
            pass

number = random.random()
print(json.dumps({
    "arguments": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "temporary": tempfile.gettempdir(),
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "main": [__name__, __file__, sys.modules["__main__"].__file__],
    "input": sys.stdin.read(),
    "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "variables": {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    "flags": list(sys.flags),
}))
print(json.dumps(["torch" in sys.modules, "vllm" in sys.modules, "vllm_backplane" in sys.modules]))
import numpy, torch
found = [torch.get_num_threads(), len(os.listdir("/proc/self/task")), sorted(opened())]
print(json.dumps([found, [number, numpy.random.random(), torch.rand(1).item(), torch.initial_seed()]]), flush=True)
raise SystemExit(3)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def without_leak_report(text: str) -> str:
    """Returns the text without the report that nanobind appends when a forked process with Triton ends.

    Objects that were imported before the fork are never freed, which Triton's extension module reports.
    """
    return text.partition("nanobind: leaked")[0]


def run(program: Path, *, warm: bool = True, **variables: str) -> tuple[list[Any], list[bool], list[float], Any]:
    """Runs PROGRAM, and returns what it printed and its process.

    The first part of the output must be the same for a started and a forked process. The second part shows which
    packages were imported at first, and the third part has random numbers.
    """
    given = {**WARM, **variables}
    with Child([sys.executable, str(program), "a", "b"], program.parent / "log", given, warm=warm) as child:
        assert child.wait(120) == 3, child.text()
        seen, modules, (found, numbers) = map(json.loads, without_leak_report(child.text()).splitlines())
        return [seen, found], modules, numbers, child.process


def test_it_is_like_one_that_was_started(program: Path) -> None:
    more = program.parent / "more"
    more.mkdir()
    (more / "another.py").touch()
    own = {"BACKPLANE_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": on_path(more)}
    plain, none, _, _ = run(program, warm=False, **own)
    forked, others, numbers, process = run(program, **own)
    assert not isinstance(process, subprocess.Popen)
    assert [name for name in plain[0] if forked[0][name] != plain[0][name]] == []  # a failure shows only these names
    assert forked == plain
    assert forked[0]["variables"].items() >= own.items()
    assert (none, others) == ([False] * 3, [True, False, False])
    _, _, again, _ = run(program, **own)
    assert not set(numbers) & set(again), "children forked from one process must draw different random numbers"


WITH_VLLM = f"""
import importlib, json, os, sys
imported = "vllm.v1.worker.gpu_worker" in sys.modules
for name in {warm_start.VLLM_MODULES}:
    importlib.import_module(name)
from vllm import envs
from vllm.platforms import current_platform
print(json.dumps([imported, {{
    "path": [folder for folder in sys.path if "setuptools" not in folder],  # which appends a folder when it is imported
    "folder": os.getcwd(),
    "threads": len(os.listdir("/proc/self/task")),
    "device": [type(current_platform).__name__, current_platform.device_type, envs.VLLM_LOGGING_PREFIX],
    "variables": {{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}},
}}]), flush=True)
os._exit(0)
"""


@pytest.mark.exhaustive
def test_children_with_the_same_variables_find_vllm_imported_under_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests a program that is started, and then forked twice."""
    (tmp_path / "program.py").write_text(WITH_VLLM)
    command = [sys.executable, str(tmp_path / "program.py")]
    own = {**WARM, "BACKPLANE_DEVICE": "sim", "VLLM_LOGGING_PREFIX": "a test "}

    def run_once(*, warm: bool) -> list[Any]:
        with Child(command, tmp_path / "log", own, warm=warm, with_vllm=True) as child:
            assert child.wait(120) == 0, child.text()
            [printed] = [line for line in child.text().splitlines() if line.startswith(("[true", "[false"))]
            return list(json.loads(printed))

    plain, *forked = [run_once(warm=warm) for warm in (False, True, True)]
    assert [imported for imported, _ in (plain, *forked)] == [False, True, True]
    assert plain[1]["device"][1:] == ["bpnpu", own["VLLM_LOGGING_PREFIX"]]
    for _, found in forked:
        assert found == plain[1]
    monkeypatch.setattr(warm_start, "MOST_WITH_VLLM", 1)
    own["VLLM_LOGGING_PREFIX"] = "another test "
    assert run_once(warm=True)[1]["device"][2] == "another test "
    kept = warm_start._forker()._with_vllm
    assert [dict(key)["VLLM_LOGGING_PREFIX"] for key in kept] == ["another test "], "idle processes must have ended"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "TMPDIR", "HOME", "HF_HOME", "LD_PRELOAD"])
def test_variables_that_a_library_may_have_read_are_not_for_a_fork(name: str, tmp_path: Path) -> None:
    """Tests that a child with another value of such a variable, or without the variable, is not forked."""
    (tmp_path / "log").touch()
    command = [sys.executable, str(tmp_path / "program.py")]
    assert warm_start.fork(command, tmp_path / "log", environment(**{name: "another"})) is None
    if name in os.environ:
        assert warm_start.fork(command, tmp_path / "log", environment(**{name: None})) is None


@pytest.mark.parametrize(
    "name",
    [
        "torch/__init__.py",
        "numpy.py",
        "torch-9.0.dist-info/METADATA",
        "sitecustomize.py",
        "x.dist-info/entry_points.txt",
    ],
)
def test_folders_with_what_a_library_may_have_found_are_not_for_a_fork(name: str, tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    found = tmp_path / "site" / name
    found.parent.mkdir(parents=True)
    found.write_text("[torch.backends]\nmine = mine:load\n")
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    variables = environment(PYTHONPATH=on_path(tmp_path / "site"))
    assert warm_start.fork(command, tmp_path / "log", variables) is None
    found.write_text("[vllm_backplane.devices]\nmine = mine:Device\n")
    allowed = warm_start.fork(command, tmp_path / "log", variables)
    assert (allowed is not None) == (found.name == "entry_points.txt")
    assert allowed is None or allowed.wait(60) == 3


@pytest.mark.parametrize("path", ["relative", ""])
def test_folders_that_depend_on_where_it_starts_are_not_for_a_fork(path: str, tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    variables = environment(PYTHONPATH=os.pathsep.join([path, on_path(tmp_path)]))
    assert warm_start.fork([sys.executable, "-c", "pass"], tmp_path / "log", variables) is None


SOURCE = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps([sys.argv, sys.path, os.getcwd(), __name__, "__file__" in globals(), main.sys is sys]))
print("an error", file=sys.stderr)
raise SystemExit(4)
"""


def test_a_program_that_is_a_text_has_outputs_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SOURCE, "a"]
    started = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    forked = programs.run(command, cwd=tmp_path)
    assert (forked.returncode, forked.stdout) == (4, started.stdout)
    assert without_leak_report(forked.stderr) == "an error\n"
    assert started.returncode == 4


def test_a_child_with_such_variables_is_started(program: Path) -> None:
    temporary = program.parent / "temporary"
    temporary.mkdir()
    (seen, found), modules, _, process = run(program, OMP_NUM_THREADS="7", TMPDIR=str(temporary))
    assert isinstance(process, subprocess.Popen)
    assert modules == [False] * 3
    assert seen["temporary"] == str(temporary)
    assert seen["variables"]["OMP_NUM_THREADS"] == "7"
    assert found[0] > 1, "PyTorch must read the variable; it may use fewer threads where a machine has fewer cores"


def test_how_it_ended_is_known(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, str(tmp_path / "program.py")]
    with Child(command, tmp_path / "log", warm=True) as child, pytest.raises(AssertionError, match="still running"):
        child.wait(0.1)
    assert child.process.poll() == -9
    (tmp_path / "program.py").write_text("raise ValueError('no')\n")
    with Child(command, tmp_path / "log", warm=True) as child:
        assert child.wait(60) == 1
        assert "ValueError: no" in child.text()
