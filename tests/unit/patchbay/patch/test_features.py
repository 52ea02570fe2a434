"""Tests patch files of one feature: they are loaded with it, and do not affect users of other features."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import PatchSession, PatchSet, Process
from vllm_patchbay.patch.collection import waits_for

from .conftest import Host

PATCH = """
import host_package_loads
from vllm_patchbay.patch import Patch, Process
host_package_loads.names.append(__name__)
{extra}

@Patch(
    target="host_package.{target}",
    process=Process.WORKER,
    versions=">=1,<2",
    why="a reason",
    how="a way",
    upstream="none: a test",
    remove_when="never",
    fingerprints={{"1.0": "{fingerprint}"}},
    on_import={on_import},
    after={after!r},
)
def {name}(*args, **kwargs):
    return "patched", {name}.original(*args, **kwargs)
"""

Put = Callable[..., None]


@pytest.fixture
def put(host: Host, tmp_path: Path) -> Iterator[Put]:
    folder = tmp_path / "feature_patches" / "worker"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder.parent / "__init__.py").touch()
    (tmp_path / "host_package_loads.py").write_text("names = []\n")

    def write(target: str, name: str, *, file: str = "", fingerprint: str = "", **fields: Any) -> None:
        known = fingerprint or host.fingerprint(f"host_package.{target}")
        given = {"on_import": True, "extra": "", "after": None, **fields}
        text = PATCH.format(target=target, name=name, fingerprint=known, **given)
        (folder / f"patch_{file or name}.py").write_text(text)

    yield write
    for name in [name for name in sys.modules if name.startswith(("feature_patches", "host_package_loads"))]:
        del sys.modules[name]


def _start(host: Host) -> PatchSession:
    session = host.session()
    session.apply(PatchSet.of_packages(["feature_patches"], defer_features=True), Process.WORKER)
    return session


def _loaded() -> list[str]:
    return [name.rpartition(".")[2] for name in sys.modules["host_package_loads"].names]


def test_it_is_loaded_with_its_feature_and_not_before(host: Host, put: Put) -> None:
    put("late:feature", "feature")
    put("core:double", "always", on_import=False)
    session = _start(host)
    assert _loaded() == ["patch_always"]
    late = host.module("late")
    assert _loaded() == ["patch_always", "patch_feature"]
    assert late.feature() == ("patched", "plain")
    assert set(session.rebindings) == {"feature"}  # the target of the other patch is not imported yet
    assert host.module("core").double(1) == ("patched", 2)
    session.undo()
    assert (late.feature(), host.module("core").double(1)) == ("plain", 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"extra": "import no_such_module_anywhere"}, "no_such_module_anywhere"),
        ({"fingerprint": "0123456789abcdef 0123"}, "not what the patch was written against"),
        ({"target": "late:featured", "fingerprint": "0123456789abcdef"}, "does not exist"),
        ({"extra": "always = Patch"}, ""),
    ],
)
def test_a_faulty_patch_stops_no_other(host: Host, put: Put, wrong: dict[str, str], message: str) -> None:
    put(**{"target": "late:feature", "name": "feature", **wrong})
    put("core:double", "always", on_import=False)
    _start(host)
    assert host.module("core").double(1) == ("patched", 2)
    if not message:
        assert host.module("late").feature() == ("patched", "plain")
        return
    for _ in range(2):
        with pytest.raises((PatchError, ModuleNotFoundError), match=message):
            host.module("late")


def test_a_rival_is_found_when_it_is_loaded(host: Host, put: Put) -> None:
    put("late:feature", "one", on_import=False)
    put("late:feature", "two")
    _start(host)
    with pytest.raises(PatchError, match=r"several patches replace host_package\.late:feature"):
        host.module("late")
    with pytest.raises(PatchError, match=r"several patches replace host_package\.late:feature"):
        PatchSet.of_packages(["feature_patches"])  # as 'vllm-patchbay check' loads them


def test_rivals_that_are_both_left_for_their_feature_are_found(host: Host, put: Put) -> None:
    put("late:feature", "one")
    put("late:feature", "two")
    put("core:double", "other")
    session = _start(host)
    for _ in range(2):
        with pytest.raises(PatchError, match=r"several patches replace host_package\.late:feature"):
            host.module("late")
    assert not session.rebindings
    assert host.module("core").double(1) == ("patched", 2)  # another feature is not affected


@pytest.mark.parametrize("first", ["one", "always"])
def test_an_order_holds_among_files_of_a_feature(host: Host, put: Put, first: str) -> None:
    put("late:feature", first, on_import=first != "always")
    put("late:feature", "next", file="a_comes_before_it", after=first)
    session = _start(host)
    late = host.module("late")
    assert late.feature() == ("patched", ("patched", "plain"))
    assert list(session.rebindings) == [first, "next"]
    session.undo()
    assert late.feature() == "plain"


def test_a_namesake_is_found_when_it_is_loaded(host: Host, put: Put) -> None:
    put("late:feature", "same", file="one")
    put("core:double", "same", file="two")
    _start(host)
    assert host.module("late").feature() == ("patched", "plain")
    with pytest.raises(PatchError, match="two patches have the name 'same'"):
        host.module("core")


def test_files_of_one_feature_fail_by_themselves(host: Host, put: Put) -> None:
    put("core:double", "broken", extra="import no_such_module_anywhere")
    put("core:Engine.run", "run")
    core = host.module("core")
    with pytest.raises(PatchError, match="no_such_module_anywhere"):
        _start(host)
    assert (core.double(1), core.Engine().run(1)) == (2, ("patched", ("run", 1, False)))


def test_every_command_sees_every_patch(host: Host, put: Put, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_patchbay.cli import main

    put("late:feature", "feature")
    assert main(["list", "--package", "feature_patches", "--json"]) == 0
    assert [patch["name"] for patch in json.loads(capsys.readouterr().out)] == ["feature"]


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("@Patch(target='a.b:C.d', on_import=True)\ndef f(): ...", ("a.b",)),
        ("x = patch.Patch(target='a.b:C', on_import=True).value('x', 1, __name__)", ("a.b",)),
        ("Patch(target='a:C', on_import=True)\nPatch(target='b:C', on_import=True)", ("a", "b")),
        ("Patch(target='a:C', on_import=True)\nPatch(target='b:C')", ()),
        ("Patch(target='a:C', on_import=False)", ()),
        ("Patch(target=TARGET, on_import=True)", ()),
        ("def broken(:", ()),
        ("", ()),
    ],
)
def test_whether_a_file_waits_is_read_off_its_source(source: str, modules: tuple[str, ...]) -> None:
    assert waits_for(source) == modules
