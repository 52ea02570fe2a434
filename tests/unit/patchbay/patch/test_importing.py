"""Tests modules that are imported later or are in the middle of their import: they are patched at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import PatchSet, Process

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
