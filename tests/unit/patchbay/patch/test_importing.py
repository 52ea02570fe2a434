"""Tests modules that are imported later or are in the middle of their import: they are patched at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import PatchSet, Process, import_hook

from .conftest import Host, applied


def test_a_patch_for_one_feature_waits_for_its_module_and_fails_alone(host: Host) -> None:
    core = host.module("core")

    @host.patch("late:feature", on_import=True)
    def feature():  # type: ignore[no-untyped-def]
        return "patched " + feature.original()

    @host.patch("core:double")
    def doubled(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    host.rewrite("late.py", '"plain"', '"changed"')
    applied(host, feature, doubled)
    assert core.double(1) == 0  # the other patch is not stopped
    assert "host_package.late" not in sys.modules
    for _ in range(2):  # a second import does not succeed without the patch
        with pytest.raises(PatchError, match="not what the patch was written against"):
            host.module("late")
    assert core.double(1) == 0


def test_a_feature_that_is_there_already_fails_after_the_others_are_applied(host: Host) -> None:
    core, late = host.module("core"), host.module("late")

    @host.patch("late:feature", on_import=True)
    def feature():  # type: ignore[no-untyped-def]
        return "patched"

    @host.patch("core:double")
    def doubled(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    host.rewrite("late.py", '"plain"', '"changed"')
    session = host.session()
    for _ in range(2):
        with pytest.raises(PatchError, match="not what the patch was written against"):
            session.apply(PatchSet((feature, doubled)), Process.WORKER)
    assert (core.double(1), late.feature()) == (0, "plain")


HALF = """
import host_package_hook
from host_package.core import double
host_package_hook.meet()

def feature():
    return "plain"

if host_package_hook.fails:
    raise RuntimeError("half way")
"""


@pytest.fixture
def hook(host: Host) -> Iterator[Any]:
    """Returns a module whose function the module 'late' calls in the middle of its import."""
    hook = ModuleType("host_package_hook")
    hook.meet, hook.fails = lambda: None, False  # type: ignore[attr-defined]
    sys.modules[hook.__name__] = hook
    (host.folder / "late.py").write_text(HALF)
    yield hook
    del sys.modules[hook.__name__]


def test_a_module_that_is_half_way_through_its_import_is_patched_at_its_end(host: Host, hook: Any) -> None:
    @host.patch("late:feature")
    def feature():  # type: ignore[no-untyped-def]
        return "patched"

    session = host.session()
    seen = []

    def meet() -> None:
        for _ in range(2):
            session.apply(PatchSet((feature,)), Process.WORKER)
            seen.append(session.summary())

    hook.meet = meet
    assert host.module("late").feature() == "patched"
    assert seen == [["feature waits for its module"]] * 2
    assert session.summary() == ["feature applied"]
    assert type(host.module("late").__spec__) is ModuleSpec
    session.undo()
    assert host.module("late").feature() == "plain"


def test_an_import_that_fails_half_way_is_waited_for_again(host: Host, hook: Any) -> None:
    @host.patch("late:feature")
    def feature():  # type: ignore[no-untyped-def]
        return "patched"

    hook.meet, hook.fails = lambda: applied(host, feature), True
    with pytest.raises(RuntimeError, match="half way"):
        host.module("late")
    hook.meet, hook.fails = lambda: None, False
    assert host.module("late").feature() == "patched"


def test_a_patch_that_fails_at_the_end_of_an_import_fails_the_next_one_too(host: Host, hook: Any) -> None:
    known = {"1.0": "0123456789abcdef 0123"}
    feature = host.patch("late:feature", fingerprints=known, on_import=True)(lambda: 0)
    session = host.session()
    hook.meet = lambda: session.apply(PatchSet((feature,)), Process.WORKER)
    for _ in range(2):
        with pytest.raises(PatchError, match="not what the patch was written against"):
            host.module("late")
        hook.meet = lambda: None


def test_undo_before_the_module_is_there(host: Host) -> None:
    @host.patch("late:feature")
    def feature():  # type: ignore[no-untyped-def]
        return "patched"

    session = applied(host, feature)
    session.undo()
    assert host.module("late").feature() == "plain"
    session.apply(PatchSet((feature,)), Process.WORKER)
    assert host.module("late").feature() == "patched"
    session.undo()
    assert host.module("late").feature() == "plain"


def test_a_module_imported_later_is_patched_before_anyone_sees_it(host: Host) -> None:
    @host.patch("late:feature")
    def feature():  # type: ignore[no-untyped-def]
        return "patched " + feature.original()

    session = applied(host, feature)
    assert "host_package.late" not in sys.modules
    late = host.module("late")
    assert late.feature() == "patched plain"
    assert type(late.__spec__.loader).__name__ == "SourceFileLoader"
    session.undo()
    assert late.feature() == "plain"


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list of the modules of the package for which the action ran."""
    monkeypatch.setattr(import_hook, "_watcher", import_hook._Watcher())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return []


def test_an_action_runs_once_for_each_module_of_a_package(host: Host, watched: list[str]) -> None:
    host.module("core")
    import_hook.for_each_module("host_package", lambda module: watched.append(module.__name__))
    assert sorted(watched) == ["host_package", "host_package.core"], "modules that are imported already"
    late = host.module("late")
    assert watched[2:] == ["host_package.late"], "and every other one after its import"
    assert late.feature() == "plain"
    assert late.__loader__ is late.__spec__.loader
    assert type(late.__loader__).__module__ == "_frozen_importlib_external"
    host.module("late")
    assert len(watched) == 3


def test_an_action_for_a_package_that_fails_fails_the_import(host: Host, watched: list[str]) -> None:
    def refuse(module: ModuleType) -> None:
        if module.__name__ == "host_package.late":
            raise ValueError("not this one")

    import_hook.for_each_module("host_package", refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match="not this one"):
            host.module("late")
