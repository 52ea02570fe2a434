"""Tests that patches are applied and undone: every kind of target, every module that holds it, each once."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import Outcome, Patch, PatchSet, Process, verify

from .conftest import FIELDS, Host, applied


def test_a_function_is_replaced_in_every_module_that_imported_it(host: Host) -> None:
    core, user = host.module("core"), host.module("user")

    @host.patch("core:double")
    def tripled(x, *, by=2):  # type: ignore[no-untyped-def]
        return tripled.original(x, by=by) + x

    session = applied(host, tripled)
    assert (core.double(5), user.use(5)[:2]) == (15, (15, 15))
    session.undo()
    assert (core.double(5), user.use(5)[:2]) == (10, (10, 10))


def test_undo_reaches_who_imported_the_replacement_later(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def tripled(x, *, by=2):  # type: ignore[no-untyped-def]
        return tripled.original(x, by=by) + x

    limit = host.patch("core:LIMIT").value("limit", 99, __name__)
    session = applied(host, tripled, limit)
    user = host.module("user")
    kept = [core.double]
    assert user.use(5)[:3] == (15, 15, 99)
    session.undo()
    assert user.use(5)[:4] == (10, 10, 7, 7)
    assert (user.double, user.twice) == (core.double, core.double)
    assert kept[0](5) == 15  # a reference outside any module still works


def test_a_module_that_defines_the_replacement_keeps_it(host: Host) -> None:
    """By identity alone, it would be rebound like a module that imported it."""
    host.module("core")
    (host.folder / "ours.py").write_text("def ours(x, *, by=2):\n    return 'ours'\n")
    ours = host.module("ours")
    session = applied(host, host.patch("core:double")(ours.ours))
    user = host.module("user")
    assert user.use(1)[:2] == ("ours", "ours")
    session.undo()
    assert (user.use(1)[:2], ours.ours(1)) == ((2, 2), "ours")


def test_methods_of_every_kind(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:Engine.run")
    def run(self, x, flag=False):  # type: ignore[no-untyped-def]
        return ("patched", *run.original(self, x, flag))

    @host.patch("core:Engine.helper")
    def helper(x):  # type: ignore[no-untyped-def]
        return helper.original(x) * 10

    @host.patch("core:Engine.make")
    def make(cls, x=0):  # type: ignore[no-untyped-def]
        return ("made", *make.original(cls, x))

    @host.patch("core:Engine.name")
    def name(self):  # type: ignore[no-untyped-def]
        return "re" + name.original(self)

    class Turbine(core.Engine):  # type: ignore[misc,name-defined]
        pass

    session = applied(host, run, helper, make, name)
    engine = core.Engine()
    assert engine.run(1) == ("patched", "run", 1, False)
    assert (core.Engine.helper(1), engine.helper(1)) == (20, 20)
    assert core.Engine.make(4) == ("made", "Engine", 4)
    assert Turbine.make(4) == ("made", "Turbine", 4)
    assert engine.name == "reengine"
    session.undo()
    assert (engine.run(1), engine.helper(1), core.Engine.make(4), engine.name) == (
        ("run", 1, False),
        2,
        ("Engine", 4),
        "engine",
    )


def test_a_class_is_replaced_by_a_subclass_of_it(host: Host) -> None:
    core, user = host.module("core"), host.module("user")

    @host.patch("core:Engine")
    class Better(core.Engine):  # type: ignore[misc,name-defined]
        def run(self, x, flag=False):  # type: ignore[no-untyped-def]
            return ("better", x)

    session = applied(host, Better)
    assert user.use(1)[4] == ("better", 1)
    session.undo()
    assert user.use(1)[4] == ("run", 1, False)

    @host.patch("core:Engine")
    def best(original):  # type: ignore[no-untyped-def]
        return type("Best", (original,), {"run": lambda self, x, flag=False: ("best", *original.run(self, x, flag))})

    session = applied(host, best)
    assert user.use(1)[4] == ("best", "run", 1, False)
    assert best.original is not core.Engine
    session.undo()
    assert user.use(1)[4] == ("run", 1, False)
    nothing = host.patch("core:Engine")(lambda original: None)
    with pytest.raises(PatchError, match="replaces a class by a NoneType"):
        applied(host, nothing)
    unrelated = host.patch("core:Engine")(type("Unrelated", (), {}))
    with pytest.raises(PatchError, match="must inherit"):
        applied(host, unrelated)


def test_a_constant_is_rebound_where_it_was_imported_and_nowhere_else(host: Host) -> None:
    core, user = host.module("core"), host.module("user")
    limit = host.patch("core:LIMIT").value("limit", 99, __name__)
    session = applied(host, limit)
    assert (core.LIMIT, user.LIMIT) == (99, 99)
    assert (core.OTHER, user.SEVEN) == (7, 7)  # equal small numbers are one object; they are not the same name
    session.undo()
    assert (core.LIMIT, user.LIMIT) == (7, 7)


def test_constants_and_wrapped_functions_are_followed_through_re_exports_and_stars(host: Host) -> None:
    (host.folder / "core.py").write_text(
        "import functools\nfrom enum import Enum\n"
        "LIMIT = 7\nTABLE = {}\nNUMBER = int\n"
        "class Mode(Enum):\n    A = 1\nMODE = Mode.A\n"
        "@functools.cache\ndef answer():\n    return 42\n"
    )
    (host.folder / "__init__.py").write_text("from .core import LIMIT as MOST, answer\nSEVEN = 7\n")
    (host.folder / "stars.py").write_text("from .core import *\nOTHER = 7\nOTHER_MODE = Mode.A\n")
    (host.folder / "far.py").write_text(
        "if True:\n    from host_package import MOST as FAR, answer as asked\n"
        "from host_package.stars import LIMIT, TABLE\n"
        "def f():\n    from host_package.core import LIMIT as LOCAL\nLOCAL = 7\n"
    )
    core, stars, far, package = (
        host.module("core"),
        host.module("stars"),
        host.module("far"),
        sys.modules["host_package"],
    )

    def state() -> list[Any]:
        numbers = [core.LIMIT, package.MOST, stars.LIMIT, far.FAR, far.LIMIT]
        return [*numbers, *(m() for m in (core.answer, package.answer, stars.answer, far.asked)), far.TABLE, stars.MODE]

    before = state()

    @host.patch("core:answer")
    def answering():  # type: ignore[no-untyped-def]
        return answering.original() + 1

    session = applied(
        host,
        answering,
        host.patch("core:LIMIT").value("limit", 99, __name__),
        host.patch("core:TABLE").value("table", {1: 2}, __name__),
        host.patch("core:NUMBER").value("number", bool, __name__),
        host.patch("core:MODE").value("mode", "b", __name__),
    )
    assert state() == [99] * 5 + [43] * 4 + [{1: 2}, "b"]
    assert (package.SEVEN, stars.OTHER, far.LOCAL, stars.OTHER_MODE) == (7, 7, 7, core.Mode.A)
    assert (stars.NUMBER, int("3")) == (bool, 3)  # modules that hold int for another reason keep it
    session.undo()
    assert state() == before
    assert (stars.NUMBER, bool("3")) == (int, True)


def test_applying_twice_is_applying_once(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def one_more(x, *, by=2):  # type: ignore[no-untyped-def]
        return one_more.original(x, by=by) + 1

    session = applied(host, one_more)
    session.apply(PatchSet((one_more,)), Process.WORKER)
    assert core.double(1) == 3
    with pytest.raises(PatchError, match="is already applied"):
        applied(host, one_more)  # by another session
    assert core.double(1) == 3


def test_only_the_patches_of_the_process_are_applied(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double", process=Process.ENGINE)
    def elsewhere(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    applied(host, elsewhere)
    assert core.double(1) == 2


def test_a_target_that_is_gone_stops_the_start_and_creates_nothing(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}

    @host.patch("core:dubble", fingerprints=known)
    def gone(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(PatchError, match=r"host_package\.core:dubble does not exist"):
        applied(host, gone)
    assert not hasattr(host.module("core"), "dubble")


def test_an_inherited_attribute_is_not_copied_into_the_subclass(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:Base.inherited")}

    @host.patch("core:Engine.inherited", fingerprints=known)
    def inherited(self):  # type: ignore[no-untyped-def]
        return "mine"

    with pytest.raises(PatchError, match=r"inherited from host_package.core:Base.inherited; patch it there"):
        applied(host, inherited)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): ...",
        "def f(x, by): ...",
        "def f(x, *, by, more): ...",
        "def f(*, by=2): ...",
        "async def f(x, *, by=2): ...",
    ],
)
def test_a_signature_that_does_not_fit_is_refused(host: Host, source: str, tmp_path: Any) -> None:
    module = tmp_path / "replacement_module.py"
    module.write_text(source)
    sys.path.insert(0, str(tmp_path))
    try:
        replacement = importlib.import_module("replacement_module").f
        with pytest.raises(PatchError, match="does not fit"):
            applied(host, host.patch("core:double")(replacement))
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["replacement_module"]


def test_a_replacement_without_source_is_compared_all_the_same(host: Host) -> None:
    made: dict[str, Any] = {}
    exec("def wrong(x): ...\ndef right(x, *, by=2): return 'right'", made)
    with pytest.raises(PatchError, match="does not fit"):
        applied(host, host.patch("core:double")(made["wrong"]))
    functions = [lambda x: 0, lambda x, *, by=2: "lambda"]
    with pytest.raises(PatchError, match="does not fit"):
        applied(host, host.patch("core:double")(functions[0]))
    for right, returned in ((made["right"], "right"), (functions[1], "lambda")):
        session = applied(host, host.patch("core:double")(right))
        assert host.module("core").double(1) == returned
        session.undo()


def test_the_methods_of_a_class_have_to_fit_too(host: Host) -> None:
    core = host.module("core")

    class Narrow(core.Engine):  # type: ignore[misc,name-defined]
        def run(self, x):  # type: ignore[no-untyped-def]
            return x

    with pytest.raises(PatchError, match=r"does not fit host_package\.core:Engine\.run"):
        applied(host, host.patch("core:Engine")(Narrow))


def test_a_name_that_is_served_on_demand_is_refused_before_the_start(host: Host) -> None:
    (host.folder / "__init__.py").write_text(
        "import typing\nif typing.TYPE_CHECKING:\n    from .core import double\n"
        "def __getattr__(name):\n    from . import core\n    return getattr(core, name)\n"
    )
    known = {"1.0": host.fingerprint("host_package.core:double")}
    patch = Patch(target="host_package:double", fingerprints=known, **FIELDS)(lambda x, *, by=2: 0)
    verdict = verify(patch, host.index, "1.0")
    assert verdict.outcome is Outcome.INCOMPATIBLE
    assert "it is host_package.core:double: patch it there" in verdict.detail


def test_two_patches_on_one_target_need_an_order(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def first(x, *, by=2):  # type: ignore[no-untyped-def]
        return first.original(x, by=by) + 1

    @host.patch("core:double")
    def second(x, *, by=2):  # type: ignore[no-untyped-def]
        return second.original(x, by=by) * 100

    with pytest.raises(PatchError, match=r"several patches replace host_package.core:double \(first, second\)"):
        applied(host, first, second)
    second.after = "first"
    session = applied(host, second, first)
    assert core.double(1) == 300
    session.undo()
    assert core.double(1) == 2


def test_one_that_fails_stops_none_of_the_others(host: Host) -> None:
    core, late = host.module("core"), host.module("late")
    wrong = {"1.0": "0123456789abcdef 0123"}
    failing = [
        host.patch("late:feature", on_import=True, fingerprints=wrong),
        host.patch("core:Engine.helper", fingerprints=wrong),
    ]
    failing[0](lambda: 0).name = "feature"
    failing[1](lambda x: 0).name = "helper"

    @host.patch("core:Engine.run", on_import=True)
    def running(self, x, flag=False):  # type: ignore[no-untyped-def]
        return "patched"

    @host.patch("core:double")
    def doubled(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    with pytest.raises(PatchError, match=r"(?s)patch helper: .*patch feature: "):
        applied(host, *failing, running, doubled)
    assert (core.double(1), core.Engine().run(1)) == (0, "patched")
    assert (late.feature(), core.Engine.helper(1)) == ("plain", 2)


def test_undo_refuses_to_discard_a_change_made_since(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def mine(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    session = applied(host, mine)
    core.double = lambda x: 1
    with pytest.raises(PatchError, match="was changed after the patch"):
        session.undo()


def test_an_undo_that_fails_forgets_nothing(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def mine(x, *, by=2):  # type: ignore[no-untyped-def]
        return mine.original(x, by=by) + 1

    session = applied(host, mine)
    patched = core.double
    core.double = lambda x: patched(x) * 10
    for _ in range(2):
        with pytest.raises(PatchError, match="was changed after the patch"):
            session.undo()
        session.apply(PatchSet((mine,)), Process.WORKER)  # it is still applied, and must not come to call itself
        assert core.double(1) == 30
    core.double = patched
    session.undo()
    assert core.double(1) == 2
