"""Applying and undoing: every kind of target, every holder, once."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from vllm_backplane.errors import PatchError
from vllm_backplane.patch import Outcome, Patch, PatchSet, Process

from .conftest import Host


def _apply(host: Host, *patches: Patch, **settings: Any):  # type: ignore[no-untyped-def]
    theatre = host.theatre(**settings)
    theatre.apply(PatchSet(patches).checked(), Process.WORKER)
    return theatre


def test_a_function_is_replaced_in_every_module_that_imported_it(host: Host) -> None:
    core, user = host.module("core"), host.module("user")

    @host.patch("core:double")
    def tripled(x, *, by=2):  # type: ignore[no-untyped-def]
        return tripled.original(x, by=by) + x

    theatre = _apply(host, tripled)
    assert (core.double(5), user.use(5)[:2]) == (15, (15, 15))
    theatre.undo()
    assert (core.double(5), user.use(5)[:2]) == (10, (10, 10))
    assert tripled.original is None


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

    theatre = _apply(host, run, helper, make, name)
    engine = core.Engine()
    assert engine.run(1) == ("patched", "run", 1, False)
    assert (core.Engine.helper(1), engine.helper(1)) == (20, 20)
    assert core.Engine.make(4) == ("made", "Engine", 4)
    assert Turbine.make(4) == ("made", "Turbine", 4)
    assert engine.name == "reengine"
    theatre.undo()
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

    theatre = _apply(host, Better)
    assert user.use(1)[4] == ("better", 1)
    theatre.undo()
    assert user.use(1)[4] == ("run", 1, False)

    @host.patch("core:Engine")
    def best(original):  # type: ignore[no-untyped-def]
        return type("Best", (original,), {"run": lambda self, x, flag=False: ("best", *original.run(self, x, flag))})

    theatre = _apply(host, best)
    assert user.use(1)[4] == ("best", "run", 1, False)
    assert best.original is not core.Engine
    theatre.undo()
    assert user.use(1)[4] == ("run", 1, False)
    nothing = host.patch("core:Engine")(lambda original: None)
    with pytest.raises(PatchError, match="puts a NoneType in the place of a class"):
        _apply(host, nothing)
    unrelated = host.patch("core:Engine")(type("Unrelated", (), {}))
    with pytest.raises(PatchError, match="must inherit"):
        _apply(host, unrelated)


def test_a_constant_is_rebound_where_it_was_imported_and_nowhere_else(host: Host) -> None:
    core, user = host.module("core"), host.module("user")
    limit = host.patch("core:LIMIT").value("limit", 99, __name__)
    theatre = _apply(host, limit)
    assert (core.LIMIT, user.LIMIT) == (99, 99)
    assert (core.OTHER, user.SEVEN) == (7, 7)  # equal small numbers are one object; they are not the same name
    theatre.undo()
    assert (core.LIMIT, user.LIMIT) == (7, 7)


def test_applying_twice_is_applying_once(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def one_more(x, *, by=2):  # type: ignore[no-untyped-def]
        return one_more.original(x, by=by) + 1

    theatre = _apply(host, one_more)
    theatre.apply(PatchSet((one_more,)), Process.WORKER)
    assert core.double(1) == 3


def test_only_the_patches_of_the_process_are_applied(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double", process=Process.ENGINE)
    def elsewhere(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    _apply(host, elsewhere)
    assert core.double(1) == 2


def test_a_target_that_is_gone_stops_the_start_and_creates_nothing(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}

    @host.patch("core:dubble", fingerprints=known)
    def gone(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(PatchError, match=r"host_package\.core:dubble does not exist"):
        _apply(host, gone)
    assert not hasattr(host.module("core"), "dubble")


def test_an_inherited_attribute_is_not_copied_into_the_subclass(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:Base.inherited")}

    @host.patch("core:Engine.inherited", fingerprints=known)
    def inherited(self):  # type: ignore[no-untyped-def]
        return "mine"

    with pytest.raises(PatchError, match=r"inherited from host_package.core:Base.inherited; patch it there"):
        _apply(host, inherited)


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
            _apply(host, host.patch("core:double")(replacement))
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["replacement_module"]


def test_two_patches_on_one_target_need_an_order(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def first(x, *, by=2):  # type: ignore[no-untyped-def]
        return first.original(x, by=by) + 1

    @host.patch("core:double")
    def second(x, *, by=2):  # type: ignore[no-untyped-def]
        return second.original(x, by=by) * 100

    with pytest.raises(PatchError, match=r"several patches on host_package.core:double \(first, second\)"):
        _apply(host, first, second)
    second.after = "first"
    theatre = _apply(host, second, first)
    assert core.double(1) == 300
    theatre.undo()
    assert core.double(1) == 2


def test_drift_stops_with_a_diff_and_warns_when_told_to(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}
    host.rewrite("core.py", "return x * by", "extra = by\n    return x * extra")

    @host.patch("core:double", fingerprints=known)
    def drifted(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    with pytest.raises(PatchError) as caught:
        _apply(host, drifted)
    told = str(caught.value)
    assert "is not what the patch was written against (vLLM 1.0)" in told
    assert "+     extra = by" in told
    assert "+     return x * extra" in told
    assert "1 lines that were here" in told
    assert "BACKPLANE_PATCH_DRIFT=warn" in told
    theatre = _apply(host, drifted, drift="warn")
    assert host.module("core").double(1) == 0
    assert theatre.verdicts["drifted"].outcome is Outcome.DRIFTED
    assert "not what the patch was written against" in caplog.text


def test_comments_docstrings_and_formatting_are_no_drift(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}
    host.rewrite("core.py", '"""Twice."""\n    return x * by', '"""Two times."""\n    # why not\n    return (x  *  by)')

    @host.patch("core:double", fingerprints=known)
    def same(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    assert _apply(host, same).verdicts["same"].outcome is Outcome.FITS


def test_a_patch_may_tolerate_change_and_says_why(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}
    host.rewrite("core.py", "return x * by", "return by * x")

    @host.patch("core:double", fingerprints=known, tolerates_change="it only adds a log line")
    def tolerant(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    verdict = _apply(host, tolerant).verdicts["tolerant"]
    assert verdict.outcome is Outcome.TOLERATED
    assert "it only adds a log line" in verdict.detail


@pytest.mark.parametrize(
    ("version", "outcome"),
    [("1.0", Outcome.FITS), ("1.5.dev3+gabc", Outcome.FITS), ("2.0", Outcome.NOT_NEEDED), ("1.9", Outcome.EXPIRED)],
)
def test_versions_decide(host: Host, version: str, outcome: Outcome) -> None:
    host.version = version

    @host.patch("core:double", expires=">=1.9,<2")
    def versioned(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    theatre = _apply(host, versioned)
    assert theatre.verdicts["versioned"].outcome is outcome
    assert (host.module("core").double(1) == 0) is outcome.applies


def test_a_patch_for_one_feature_waits_for_its_module_and_fails_alone(host: Host) -> None:
    core = host.module("core")

    @host.patch("late:feature", on_import=True)
    def feature():  # type: ignore[no-untyped-def]
        return "patched " + feature.original()

    @host.patch("core:double")
    def doubled(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    host.rewrite("late.py", '"plain"', '"changed"')
    _apply(host, feature, doubled)
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
    theatre = host.theatre()
    for _ in range(2):
        with pytest.raises(PatchError, match="not what the patch was written against"):
            theatre.apply(PatchSet((feature, doubled)), Process.WORKER)
    assert (core.double(1), late.feature()) == (0, "plain")


def test_undo_before_the_module_is_there(host: Host) -> None:
    @host.patch("late:feature")
    def feature():  # type: ignore[no-untyped-def]
        return "patched"

    theatre = _apply(host, feature)
    theatre.undo()
    assert host.module("late").feature() == "plain"
    theatre.apply(PatchSet((feature,)), Process.WORKER)
    assert host.module("late").feature() == "patched"
    theatre.undo()
    assert host.module("late").feature() == "plain"


def test_a_module_imported_later_is_patched_before_anyone_sees_it(host: Host) -> None:
    @host.patch("late:feature")
    def feature():  # type: ignore[no-untyped-def]
        return "patched " + feature.original()

    theatre = _apply(host, feature)
    assert "host_package.late" not in sys.modules
    late = host.module("late")
    assert late.feature() == "patched plain"
    assert type(late.__spec__.loader).__name__ == "SourceFileLoader"
    theatre.undo()
    assert late.feature() == "plain"


def test_undo_refuses_to_discard_a_change_made_since(host: Host) -> None:
    core = host.module("core")

    @host.patch("core:double")
    def mine(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    theatre = _apply(host, mine)
    core.double = lambda x: 1
    with pytest.raises(PatchError, match="was changed again since"):
        theatre.undo()
