"""Guards compare private source of vLLM with recorded fingerprints, and react to what changed."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from vllm_patchbay.cli import main
from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import Guard, Guards, Outcome
from vllm_patchbay.patch import guard as guard_module
from vllm_patchbay.patch.guard import Record, declared_in, recorded, verify_guard
from vllm_patchbay.patch.mentions import statements_with
from vllm_patchbay.upstream import SymbolIndex, cached_tree
from vllm_patchbay.upstream.source import FolderTree

CORE = """
class Runner:
    def _prepare(self, step):
        self.buffer = step
        return self.buffer

    def _sample(self):
        return 1
"""
PREPARE = Guard("vllm.core:Runner._prepare", "its buffers are written instead", "plugin.runner", "decode steps")
SAMPLE = Guard("vllm.core:Runner._sample", "another sampler draws", "plugin.sampler")


def index(folder: Path, core: str = CORE, version: str = "0.32.0") -> SymbolIndex:
    package = folder / version / "vllm"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "core.py").write_text(core)
    return SymbolIndex(FolderTree(package, version))


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return recorded([PREPARE, SAMPLE], Record({}, {}), index(tmp_path / "known"), "0.32.0")


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (("", ""), Outcome.FITS),
        (("return 1", "return 1  # a comment"), Outcome.FITS),
        (("return 1", "return 2"), Outcome.FITS),  # another function
        (("self.buffer = step", "self.buffer = step\n        self.more = step"), Outcome.DRIFTED),
        (("def _prepare", "def _prepare_all"), Outcome.MISSING),
    ],
)
def test_the_source_decides(record: Record, tmp_path: Path, change: tuple[str, str], outcome: Outcome) -> None:
    verdict = verify_guard(PREPARE, record, index(tmp_path, CORE.replace(*change), "0.32.1"), "0.32.1")
    assert verdict.outcome is outcome, verdict
    if outcome is Outcome.DRIFTED:
        assert "+     self.more = step" in [line.strip() for line in verdict.diff.splitlines()]
        assert all(text in verdict.detail for text in (PREPARE.target, PREPARE.place, PREPARE.why, "0.32.1", "0.32.0"))


def test_a_known_file_is_not_parsed(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = index(tmp_path)

    def parsed(*_args: object) -> str:
        raise AssertionError("parsed")

    monkeypatch.setattr(SymbolIndex, "normalized_source_of", parsed)
    assert verify_guard(PREPARE, record, known, "0.32.0").detail == "the file is the same as in vLLM 0.32.0"
    with pytest.raises(AssertionError, match="parsed"):
        verify_guard(PREPARE, record, index(tmp_path, CORE + "# changed\n"), "0.32.0")


def test_a_target_may_be_absent_in_a_recorded_release(record: Record, tmp_path: Path) -> None:
    older = index(tmp_path, "class Runner:\n    pass\n", "0.31.0")
    more = recorded([PREPARE, SAMPLE], record, older, "0.31.0")
    assert more.releases() == ["0.31.0", "0.32.0"]
    assert verify_guard(PREPARE, more, older, "0.31.2").outcome is Outcome.NOT_NEEDED
    assert verify_guard(PREPARE, more, older, "0.32.0").outcome is Outcome.MISSING
    assert verify_guard(PREPARE, more, index(tmp_path), "0.32.0").outcome is Outcome.FITS  # the other release is kept


def test_what_is_not_recorded_is_unknown(tmp_path: Path) -> None:
    verdict = verify_guard(SAMPLE, Record({}, {}), index(tmp_path), "0.32.0")
    assert (verdict.outcome, verdict.detail.rpartition(": ")[2]) == (Outcome.DRIFTED, "no fingerprint is recorded")


def test_recording_again_replaces_the_release(record: Record, tmp_path: Path) -> None:
    changed = recorded([SAMPLE], record, index(tmp_path, CORE.replace("return 1", "return 2")), "0.32.0")
    assert list(changed.targets) == [SAMPLE.target]
    assert verify_guard(SAMPLE, changed, index(tmp_path), "0.32.0").outcome is Outcome.DRIFTED
    later = Guard(SAMPLE.target, "another sampler draws", "plugin.sampler", versions=">=0.33")
    assert recorded([later], record, index(tmp_path), "0.32.0").targets == {SAMPLE.target: {}}
    path = tmp_path / "fingerprints.json"
    changed.write(path)
    assert Record.read(path) == changed


def guards(tmp_path: Path, record: Record) -> Guards:
    found = Guards(tmp_path / "fingerprints.json", "THE_SETTING")
    record.write(found.record_file)

    @found.guarded("vllm.core:Runner._prepare", why="its buffers are written instead", fast_path="decode steps")
    def prepare() -> None:
        pass

    @found.guarded("vllm.core:Runner._sample", why="another sampler draws")
    def sample() -> None:
        pass

    assert [guard.place for guard in found.declared] == [__name__, __name__]
    return found


def verify(found: Guards, core: SymbolIndex, drift: str = "error") -> None:
    found.drift = drift
    found.verify(lambda: core, "0.32.1")


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns what guards have logged, each record once: pytest also listens to loggers that do not propagate."""
    found = {id(record): record for record in caplog.records if record.name == guard_module.logger.name}
    return list(found.values())


def test_a_fast_path_is_switched_off_with_a_warning(
    record: Record, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    found = guards(tmp_path, record)
    verify(found, index(tmp_path, CORE.replace("return self.buffer", "return 0")))
    assert list(found.switched_off) == ["decode steps"]
    [warning] = logged(caplog)
    assert "'decode steps' is switched off" in warning.getMessage() and PREPARE.target in warning.getMessage()
    assert found.is_switched_off("decode steps")
    verify(found, index(tmp_path))  # nothing is declared since
    assert len(logged(caplog)) == 1


def test_guards_of_a_used_feature_that_are_declared_later_are_verified(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Guards(tmp_path / "fingerprints.json", "THE_SETTING")
    record.write(found.record_file)
    drifted = index(tmp_path, CORE.replace("return 1", "return 2"))

    def declare(feature: str) -> None:
        found.guarded("vllm.core:Runner._sample", why="another sampler draws", feature=feature)(lambda: None)

    found.use("drawing")  # nothing is declared yet
    declare("drawing")
    declare("drawing again")
    monkeypatch.setattr(guard_module, "_installed_index", lambda: drifted)
    monkeypatch.setattr(guard_module, "installed_version", lambda: "0.32.1")
    with pytest.raises(PatchError, match="_sample"):
        found.verify_installed()
    assert found._waiting.keys() == {"drawing", "drawing again"}


def test_a_fast_path_must_have_been_verified(record: Record, tmp_path: Path) -> None:
    found = guards(tmp_path, record)
    for name in ("decode steps", "prefill steps"):
        with pytest.raises(PatchError, match=f"{name}.* has been verified"):
            found.is_switched_off(name)
    verify(found, index(tmp_path))
    assert not found.is_switched_off("decode steps")


def test_anything_else_stops_with_the_diff(record: Record, tmp_path: Path) -> None:
    changed = index(tmp_path, CORE.replace("return 1", "return 2"))
    with pytest.raises(PatchError) as fault:
        verify(guards(tmp_path, record), changed)
    for part in (SAMPLE.target, "return 2", "0.32.0", "THE_SETTING"):
        assert part in str(fault.value)
    found = guards(tmp_path, record)
    for _ in range(2):  # a second start in the process fails too
        with pytest.raises(PatchError):
            verify(found, changed)
    verify(found, changed, drift="warn")
    assert not found.switched_off


def test_a_fast_path_for_other_versions_is_off(record: Record, tmp_path: Path) -> None:
    found = Guards(tmp_path / "fingerprints.json", "THE_SETTING")
    record.write(found.record_file)
    found.guarded("vllm.core:Runner._prepare", why="x", fast_path="decode steps", versions=">=0.33")(lambda: None)
    verify(found, index(tmp_path))
    assert found.switched_off == {"decode steps": "the code is for vLLM >=0.33, and this is 0.32.1"}


@pytest.mark.parametrize("has_constructor", [True, False])
def test_a_guard_with_a_feature_waits_for_its_first_use(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_constructor: bool
) -> None:
    changed = index(tmp_path, CORE.replace("return 1", "return 2"))
    monkeypatch.setattr("vllm_patchbay.patch.guard._installed_index", lambda: changed)
    monkeypatch.setattr("vllm_patchbay.patch.guard.installed_version", lambda: "0.32.1")
    found = Guards(tmp_path / "fingerprints.json", "THE_SETTING")
    record.write(found.record_file)

    class Base:
        def __init__(self, size: int) -> None:
            self.size = size

    class Sampler(Base):
        if has_constructor:

            def __init__(self, size: int) -> None:
                super().__init__(size)

    guarded = found.guarded("vllm.core:Runner._sample", why="another sampler draws", feature="sampling")
    assert guarded(Sampler) is Sampler

    class Derived(Sampler):
        pass

    found.guarded("vllm.core:Runner._sample", why="a kernel is replaced", feature="drafts")(lambda: None)
    assert list(inspect.signature(Sampler).parameters) == ["size"]
    found.verify_installed()
    for _ in range(2):
        with pytest.raises(PatchError, match=r"return 2[^$]*set THE_SETTING"):
            Derived(3)
    with pytest.raises(PatchError, match="a kernel is replaced"):
        found.use("drafts")
    found.drift = "warn"
    assert Derived(3).size == 3
    found.drift = "error"
    assert Sampler(4).size == 4  # the feature has been verified


CONSTRUCTOR = """
class Runner:
    def __init__(self, device: Device):
        self.stream: torch.cuda.Stream | None = None
        self.buffer = torch.zeros(1)
        if self.is_async:
            self.other = 1
            self.stream = torch.cuda.Stream()
        try:
            self.rows = 1
        except ValueError:
            self.rows = torch.cuda.device_count()
        match device:
            case 1:
                self.sampler: Sampler = Sampler()
        for each in (1, 2):
            setattr(self, "rejection_sampler", each)
            if self.sampler.is_done():
                continue
"""
MENTIONED = """def __init__():
    if self.is_async:
        self.stream = torch.cuda.Stream()
    try:
        pass
    except ValueError:
        self.rows = torch.cuda.device_count()
    match device:
        case 1:
            self.sampler = Sampler()
    for each in (1, 2):
        setattr(self, 'rejection_sampler', each)
        if self.sampler.is_done():
            continue"""


def test_a_guard_can_depend_on_some_statements_of_a_function(tmp_path: Path) -> None:
    names = ("torch.cuda", "sampler", "rejection_sampler")
    part = Guard("vllm.core:Runner.__init__", "its sampler is replaced", "plugin.runner", mentions=names)
    whole = Guard("vllm.core:Runner.__init__", "its buffers are written", "plugin.runner", "decode steps")
    known = index(tmp_path / "known", CONSTRUCTOR)
    assert statements_with(names, known.normalized_source_of("vllm.core", "Runner.__init__")) == MENTIONED
    record = recorded([part, whole], Record({}, {}), known, "0.32.0")

    def outcomes(old: str, new: str) -> list[Outcome]:
        changed = index(tmp_path, CONSTRUCTOR.replace(old, new), "0.32.1")
        return [verify_guard(guard, record, changed, "0.32.1").outcome for guard in (part, whole)]

    assert outcomes("self.buffer", "self.more = self.buffer") == [Outcome.FITS, Outcome.DRIFTED]
    assert outcomes("None = None", "Any = None") == [Outcome.FITS, Outcome.DRIFTED]
    assert outcomes("Stream()", "Stream(0)") == [Outcome.DRIFTED, Outcome.DRIFTED]
    assert outcomes("if self.is_async", "if not self.is_async") == [Outcome.DRIFTED, Outcome.DRIFTED]
    assert outcomes("self.other = 1", "self.cuda = torch.cuda") == [Outcome.DRIFTED, Outcome.DRIFTED]
    assert outcomes("continue", "break") == [Outcome.DRIFTED, Outcome.DRIFTED]
    assert outcomes("device: Device", "device: Any, rows=1") == [Outcome.FITS, Outcome.DRIFTED]
    with pytest.raises(PatchError, match="'mentions' is for functions, and this is none: class Runner"):
        statements_with(names, known.normalized_source_of("vllm.core", "Runner"))


@pytest.mark.parametrize("mentions", ["sampler", ("",), ["sampler"]])
def test_mentions_are_a_tuple_of_names(mentions: Any) -> None:
    """Tests a text without the comma of a tuple too, whose letters would be the names."""
    with pytest.raises(PatchError, match="make it a tuple of names"):
        Guard("vllm.core:Runner.__init__", "its sampler is replaced", "plugin.runner", mentions=mentions)


def test_a_cache_that_cannot_be_trusted_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests that a drift is reported nevertheless, with a difference that needs no cached source."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    tmp_path.chmod(0o777)
    monkeypatch.setenv("PATCHBAY_CACHE", str(tmp_path))
    assert cached_tree("0.32.0") is None
    assert "The source of vLLM 0.32.0 is not read from the cache: " in caplog.text and str(tmp_path) in caplog.text


DECLARED = """
from plugin.guards import guarded

raise RuntimeError("this module is not imported")

class Sampler:
    @guarded("vllm.core:Runner._sample", why="another sampler draws", feature="sampling")
    def sample(self): ...
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site" / "guarded_plugin"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "sampler.py").write_text(DECLARED)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_guards_are_read_from_source(plugin: Path) -> None:
    assert declared_in("guarded_plugin", plugin) == [
        Guard(SAMPLE.target, "another sampler draws", "guarded_plugin.sampler", feature="sampling")
    ]
    (plugin / "sampler.py").write_text('@guarded("vllm.core:f", why="x", mentions=("drawn",))\ndef f(): ...\n')
    assert [guard.key for guard in declared_in("guarded_plugin", plugin)] == ["vllm.core:f [drawn]"]
    (plugin / "sampler.py").write_text('target = "vllm.core:f"\n@guarded(target, why="x")\ndef f(): ...\n')
    with pytest.raises(PatchError, match=r"sampler.py:2: the arguments of guarded are not literals"):
        declared_in("guarded_plugin", plugin)


def test_the_commands(plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plugin / "patches" / "engine").mkdir(parents=True)
    for release, core in (("0.32.0", CORE), ("0.33.0", CORE.replace("return 1", "return 2"))):
        index(tmp_path, core, release)
    trees = {release: f"{release}@{tmp_path / release / 'vllm'}" for release in ("0.32.0", "0.33.0")}
    where = ("--package", "guarded_plugin")
    assert main(["record", *where, "--vllm", trees["0.32.0"]]) == 0
    assert "1 guards for vLLM 0.32.0, 1 of them new or changed" in capsys.readouterr().out
    assert set(json.loads((plugin / "fingerprints.json").read_text())["targets"]) == {SAMPLE.target}
    checked = {}
    for release, tree in trees.items():
        status = main(["check", *where, "--vllm", tree, "--json"])
        [guard] = json.loads(capsys.readouterr().out)["guards"]
        checked[release] = (status, guard["outcome"])
    assert checked == {"0.32.0": (0, "fits"), "0.33.0": (1, "drifted")}
    assert main(["list", *where]) == 0
    assert "override" in capsys.readouterr().out
