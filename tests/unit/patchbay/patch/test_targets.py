"""Tests what can be a target. The check refuses the rest, so that no start-up is the first to find out."""

from __future__ import annotations

import importlib
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from vllm_patchbay.cli import main
from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import Outcome, Patch, PatchSet, Process, verify
from vllm_patchbay.patch.skeleton import NewPatch, write_skeleton

from .conftest import FIELDS, Host, applied

KINDS = """
from functools import cached_property

class Engine:
    declared: int
    limit: int = 3
    def __init__(self):
        self.requests = {}
    @property
    def name(self):
        return "engine"
    @name.setter
    def name(self, value):
        self.named = value
    @cached_property
    def size(self):
        return [7]
    def run(self, x):
        return x

announced: int
"""


@pytest.fixture
def kinds(host: Host) -> Host:
    (host.folder / "kinds.py").write_text(KINDS)
    return host


@pytest.mark.parametrize("name", ["Engine.requests", "Engine.declared", "announced"])
def test_what_is_no_attribute_is_missing(kinds: Host, name: str, tmp_path: Path) -> None:
    known = {"1.0": "0123456789abcdef 0123"}
    patch = kinds.patch(f"kinds:{name}", fingerprints=known).value("mine", 3, __name__)
    assert verify(patch, kinds.index, "1.0").outcome is Outcome.MISSING
    with pytest.raises(PatchError, match="does not exist"):
        applied(kinds, patch)
    with pytest.raises(PatchError, match="does not exist"):
        write_skeleton(NewPatch(f"host_package.kinds:{name}", "worker", "fresh"), kinds.index, "1.0", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_has_a_value_is_an_attribute(kinds: Host) -> None:
    patch = kinds.patch("kinds:Engine.limit").value("limit", 4, __name__)
    session = applied(kinds, patch)
    assert kinds.module("kinds").Engine.limit == 4
    session.undo()
    assert kinds.module("kinds").Engine.limit == 3


@pytest.mark.parametrize("target", ["Engine.name", "Engine.size", "Engine.run"])
def test_a_getter_or_method_that_takes_no_self_is_refused(kinds: Host, target: str) -> None:
    wrong = kinds.patch(f"kinds:{target}")(lambda: 0)
    assert verify(wrong, kinds.index, "1.0").outcome is Outcome.INCOMPATIBLE
    too_much = kinds.patch(f"kinds:{target}")(lambda self, x, y: 0)
    assert verify(too_much, kinds.index, "1.0").outcome is Outcome.INCOMPATIBLE


def test_the_skeleton_of_a_property_has_a_getter_and_a_test_that_reads_it(kinds: Host, tmp_path: Path) -> None:
    texts = {"why": "w", "how": "h", "upstream": "none: a test", "remove_when": "never"}
    new = NewPatch("host_package.kinds:Engine.name", "worker", "fresh", texts=texts)
    patch, test, _ = write_skeleton(new, kinds.index, "1.0", tmp_path / "new")
    assert "def engine_name(self):" in patch.read_text()
    assert "return engine_name.original(self)" in patch.read_text()
    assert ".__get__(" in test.read_text()


def test_a_cached_property_stays_one(kinds: Host) -> None:
    engine = kinds.module("kinds").Engine

    @kinds.patch("kinds:Engine.size")
    def size(self):  # type: ignore[no-untyped-def]
        return [*size.original(self), 8]

    session = applied(kinds, size)
    one = engine()
    assert isinstance(vars(engine)["size"], cached_property)
    assert one.size == [7, 8]
    assert one.size is one.size
    session.undo()
    assert engine().size == [7]


def test_a_class_that_a_function_returns_has_to_fit_too(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:Engine")
    def narrow(original):  # type: ignore[no-untyped-def]
        return type("Narrow", (original,), {"run": lambda self, x: x})

    before = core.Engine
    with pytest.raises(PatchError, match=r"does not fit host_package\.core:Engine\.run"):
        applied(host, narrow)
    assert core.Engine is before


def test_a_function_does_not_take_the_place_of_a_value(host: Host) -> None:
    wrong = host.patch("core:LIMIT")(lambda: 8)
    verdict = verify(wrong, host.index, "1.0")
    assert verdict.outcome is Outcome.INCOMPATIBLE
    assert ".value(" in verdict.detail


def test_a_constant_is_applied_by_one_session_only(host: Host) -> None:
    core = host.module("core")
    limit = host.patch("core:LIMIT").value("limit", 99, __name__)
    first = applied(host, limit)
    with pytest.raises(PatchError, match="is already applied"):
        applied(host, limit)
    assert limit.original == 7
    first.undo()
    assert core.LIMIT == 7
    applied(host, limit).undo()
    assert core.LIMIT == 7


def test_a_target_under_another_name_is_refused(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}
    patch = host.patch("user:double", fingerprints=known)(lambda x, *, by=2: 0)
    verdict = verify(patch, host.index, "1.0")
    assert verdict.outcome is Outcome.INCOMPATIBLE
    assert "imported from host_package.core:double; patch it there" in verdict.detail


def test_two_sets_of_patches_are_rivals_all_the_same(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def first(x, *, by=2):  # type: ignore[no-untyped-def]
        return first.original(x, by=by) + 1

    @host.patch("core:double")
    def second(x, *, by=2):  # type: ignore[no-untyped-def]
        return second.original(x, by=by) * 100

    session = host.session()
    session.apply(PatchSet((first,)), Process.WORKER)
    with pytest.raises(PatchError, match=r"several patches replace host_package.core:double \(first, second\)"):
        session.apply(PatchSet((second,)), Process.WORKER)
    assert core.double(1) == 3
    second.after = "first"
    session.apply(PatchSet((second,)), Process.WORKER)
    assert core.double(1) == 300
    assert session.summary() == ["first applied", "second applied"]
    session.undo()
    assert core.double(1) == 2


def test_an_order_that_the_processes_turn_round_is_refused(host: Host) -> None:
    def put(name: str, process: Process, **fields: Any) -> Patch:
        patch = host.patch("core:double", process=process, **fields)(lambda x, *, by=2: 0)
        patch.name = name
        return patch

    later, on_top = put("later", Process.WORKER), put("on_top", Process.PLATFORM, after="later")
    with pytest.raises(PatchError, match="on_top is for platform and has after='later', which is for worker"):
        PatchSet((later, on_top)).checked()
    PatchSet((put("early", Process.PLATFORM), put("late", Process.WORKER, after="early"))).checked()
    waits, hastens = put("waits", Process.WORKER, on_import=True), put("hastens", Process.WORKER, after="waits")
    with pytest.raises(PatchError, match="hastens has after='waits', which waits for its module"):
        PatchSet((waits, hastens)).checked()


@pytest.mark.parametrize("target", ["core:double", "core:Engine.run"])
def test_the_summary_shows_that_a_module_was_reloaded(host: Host, target: str) -> None:
    core = host.module("core")
    patch = host.patch(target)(lambda *args, **kwargs: 0)
    patch.name = "mine"
    session = applied(host, patch)
    assert session.summary() == ["mine applied"]
    importlib.reload(core)
    assert session.summary() == ["mine NO LONGER IN PLACE"]


def test_a_name_that_is_made_on_demand_and_nowhere_else(
    host: Host, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    patch = Patch(target="vllm.envs:VLLM_PORT", fingerprints={"1.0": "0123456789abcdef"}, **FIELDS)
    patch.value("port", 3, __name__)
    from vllm_patchbay.upstream import SymbolIndex, installed_tree

    verdict = verify(patch, SymbolIndex(installed_tree()), "1.0")
    assert verdict.outcome is Outcome.INCOMPATIBLE
    assert "vllm.envs:VLLM_PORT: patch it there" not in verdict.detail
    assert "vllm.envs:__getattr__" in verdict.detail
    where = ["--process", "engine", "--root", str(tmp_path / "new"), "--package", "fresh"]
    assert main(["new", "vllm.envs:VLLM_PORT", *where]) == 1
    assert "on demand" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_modules_of_one_last_name_have_files_of_their_own(host: Host, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (host.folder / folder).mkdir()
        (host.folder / folder / "__init__.py").touch()
        (host.folder / folder / "core.py").write_text("def f():\n    return 1\n\ndef g():\n    return 2\n")
    names = []
    for target in ("one.core:f", "two.core:f"):
        new = NewPatch(f"host_package.{target}", "worker", "fresh")
        names.append(write_skeleton(new, host.index, "1.0", tmp_path / "new")[0].name)
    assert names == ["patch_core.py", "patch_two_core.py"]
    with pytest.raises(PatchError, match=r"patch_two_core\.py exists; add the patch to it by hand"):
        write_skeleton(NewPatch("host_package.two.core:g", "worker", "fresh"), host.index, "1.0", tmp_path / "new")
