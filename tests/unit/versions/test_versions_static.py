"""Our package fits every supported vLLM release, read from its wheel: patches, names, calls and the auditor's rules."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from own_calls import calls
from own_names import Presence, faults_of_bindings, faults_of_hooks, index_of

import vllm_backplane
from vllm_backplane.binding.operator_callers import HOOKS, IR_OPERATOR
from vllm_backplane.binding.registry import BINDINGS
from vllm_backplane.cli import main
from vllm_backplane.patches import OWN
from vllm_backplane.settings import compat
from vllm_backplane.settings.releases import FULL, NEWEST, RELEASES
from vllm_patchbay.audit import Severity, audit
from vllm_patchbay.patch import PatchSet
from vllm_patchbay.upstream import SourceTree, SymbolIndex, open_tree

pytestmark = pytest.mark.slow

PACKAGE = Path(vllm_backplane.__file__).parent
ROOT = PACKAGE.parent
LARGE_DOWNLOAD = (pytest.mark.download, pytest.mark.exhaustive)
VERSIONS = [
    pytest.param(each.version, marks=() if each is NEWEST else LARGE_DOWNLOAD, id=each.version) for each in RELEASES
]


@pytest.fixture(scope="module")
def index_with() -> Callable[[str], SymbolIndex]:
    """Returns an index of our package and a version of vLLM, which tests share."""
    return cache(lambda version: index_of(PACKAGE, open_tree(version)))


@pytest.fixture(scope="module")
def trees() -> list[SourceTree]:
    return [open_tree(release.version) for release in RELEASES]


@pytest.mark.parametrize("version", VERSIONS)
def test_our_patches_fit(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["patches", "check", "--vllm", version, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (status, found["vllm"]) == (0, version)
    assert {patch["outcome"] for patch in found["patches"]} <= {"fits", "not needed"}


@pytest.mark.parametrize("version", VERSIONS)
def test_our_patches_recognize_their_fix(version: str) -> None:
    """Each patch states what the fixed source has, or the faulty one, and no supported release is fixed."""
    index = SymbolIndex(open_tree(version))
    for patch in PatchSet.of_packages([OWN]).require_complete().patches:
        conditions = ((patch.fixed_if, False), (patch.faulty_while, True))
        given = [(condition, is_there) for condition, is_there in conditions if condition is not None]
        assert given, f"{patch.name}: give it fixed_if or faulty_while"
        for (where, text), is_there in given:
            module, _, name = where.partition(":")
            assert (text in index.normalized_source_of(module, name)) is is_there, (patch.name, where, text)


@pytest.mark.parametrize("version", VERSIONS)
def test_our_package_audits_clean(version: str) -> None:
    report = audit(PACKAGE, [open_tree(version)])
    assert report.files > 100
    assert [f"{f.file}:{f.line} {f.rule_id} {f.message}" for f in report.findings] == []


@pytest.mark.exhaustive
@pytest.mark.download
def test_what_changed_upstream_is_what_we_know_of(trees: list[SourceTree]) -> None:
    """The kernel lost two arguments in 0.32; its replacement binds arguments by name and does not need them."""
    report = audit(PACKAGE, trees)
    found = [(f.rule_id, f.severity, f.vllm, f.message.partition(" changed")[0]) for f in report.findings]
    kernel = "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel"
    assert found == [("BP202", Severity.WARNING, "0.32.0", kernel)]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_binding_and_hook_is_there(version: str, index_with: Callable[[str], SymbolIndex]) -> None:
    index = index_with(version)
    assert list(faults_of_bindings(index, BINDINGS)) == []
    assert list(faults_of_hooks(index, HOOKS)) == []


def test_every_override_is_of_something() -> None:
    """Checks the newest release. What only older releases have is declared, and may be nothing's override here."""
    presence = Presence(PACKAGE, [open_tree(NEWEST.version)])
    assert len(presence.defined) > 100
    assert len(presence.read) > 30
    assert list(presence.faults({})) == []


@pytest.mark.exhaustive
@pytest.mark.download
def test_every_override_is_of_something_in_each_release(trees: list[SourceTree]) -> None:
    assert list(Presence(PACKAGE, trees).faults(compat.NOT_IN_EVERY_RELEASE)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_our_calls_are_accepted(version: str, index_with: Callable[[str], SymbolIndex]) -> None:
    found = list(calls(PACKAGE, index_with(version)))
    assert len(found) > 30
    assert [each for each in found if each.fault and not each.where.startswith("settings/compat.py:")] == []


# --- the checks above can fail


def test_a_wrong_binding_is_found() -> None:
    index = index_of(PACKAGE, open_tree("installed"))
    gone = dataclasses.replace(BINDINGS[0], upstream=BINDINGS[0].upstream + "s")
    never = dataclasses.replace(BINDINGS[0], upstream="vllm.v1.worker.gpu_worker:Worker")
    other = dataclasses.replace(BINDINGS[0], replacement=BINDINGS[1].replacement)
    found = list(faults_of_bindings(index, [gone, never, other]))
    assert [each.partition(": ")[2].partition(" of")[0] for each in found] == [
        "there is no such class",
        "it never looks up a replacement",
        "not a subclass",
    ]


def test_a_wrong_hook_is_found(tmp_path: Path) -> None:
    copy = _copy(tmp_path, {"runner/triton_replacements.py": (r"cu_num_tokens_ptr: torch", "cu_num_token_ptr: torch")})
    gone = [dataclasses.replace(hook, upstream=hook.upstream + "s") for hook in HOOKS]
    index = index_of(copy, open_tree("installed"))
    assert len(list(faults_of_hooks(index, gone))) == len(HOOKS)
    assert list(faults_of_hooks(index, HOOKS)) == [
        "vllm.v1.sample.rejection_sampler:expand_kernel: it has no argument cu_num_token_ptr"
    ]
    first, second, *_ = (hook for hook in HOOKS if hook.kind == IR_OPERATOR)
    swapped = dataclasses.replace(first, replacement=second.replacement)
    assert "'weight' is at another position" in "".join(faults_of_hooks(index, [swapped]))


def test_a_wrong_name_in_a_class_is_found(tmp_path: Path) -> None:
    copy = _copy(
        tmp_path,
        {
            "platform.py": ("def get_punica_wrapper", "def get_punica_wraper"),
            "runner/v1.py": ("def _zero_block_ids", "def _zero_blocks_by_id"),
            "attention/implementation.py": ("def do_kv_cache_update", "def do_kv_cache_updates"),
            "worker/worker.py": (r"self\.local_rank,", "self.rank_on_host,"),
            "distributed/communicator.py": (
                "from vllm.distributed.device_communicators.base_device_communicator import",
                "from vllm.distributed.device_communicators.base_communicator import",
            ),
            "runner/sampler.py": (r"def greedy_sample\(logits", "def greedy_sample(logits, temperature"),
        },
    )
    tree = open_tree("installed")
    found = list(Presence(copy, [tree]).faults({}))
    uncalled = f"no class of vLLM {tree.version} has it, and nothing calls it"
    assert sorted(found) == [
        f"attention/implementation.py:BackplaneAttentionImpl.do_kv_cache_updates: {uncalled}",
        f"platform.py:BackplanePlatform.get_punica_wraper: {uncalled}",
        "runner/v1.py:BackplaneModelRunnerV1._zero_blocks_by_id: " + uncalled,
        "worker/worker.py:BackplaneWorker.rank_on_host is read, and nothing sets it",
    ]
    found = {(f.rule_id, f.file, f.severity) for f in audit(copy, [tree]).findings}
    assert found == {
        ("BP101", "distributed/communicator.py", Severity.ERROR),
        ("BP401", "runner/sampler.py", Severity.ERROR),
    }


def test_a_wrong_call_is_found(tmp_path: Path) -> None:
    copy = _copy(
        tmp_path,
        {
            "runner/v1.py": (r"self\._dummy_run\(1, skip_eplb", "self._dummy_run(1, skip_epl"),
            "worker/worker.py": (r"set_random_seed\(self", "set_random_seed(1, 2, self"),
            "layers/moe.py": (r"\.create_weights\(layer, \*args, \*\*kwargs\)", ".create_weights()"),
        },
    )
    found = [each for each in calls(copy, index_of(copy, open_tree("installed"))) if each.fault]
    assert sorted((each.where.partition(":")[0], each.fault.partition(" in ")[0][:24]) for each in found) == [
        ("layers/moe.py", "no value for layer"),
        ("runner/v1.py", "no argument skip_epl"),
        ("worker/worker.py", "3 arguments by position "),
    ]


def test_what_only_some_vllms_have_must_be_declared(tmp_path: Path) -> None:
    """Two source trees that differ in one method stand for two releases."""
    for version, method in (("1.0", "step"), ("2.0", "walk")):
        folder = tmp_path / version / "vllm"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "core.py").write_text(f"class Engine:\n    def {method}(self): ...\n    def run(self): ...\n")
    package = tmp_path / "plug"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from vllm.core import Engine\n\nclass Mine(Engine):\n    def step(self): ...\n    def run(self): ...\n"
    )
    trees = [open_tree(f"{version}@{tmp_path / version}") for version in ("1.0", "2.0")]
    presence = Presence(package, trees)
    assert presence.not_in_every_release() == {"vllm.core:Engine.step": "__init__.py:Mine.step"}
    assert list(presence.faults({"vllm.core:Engine.step": "why"})) == []
    [undeclared, stale] = presence.faults({"vllm.core:Engine.run": "why"})
    assert "Engine.step is not in every vLLM" in undeclared
    assert stale.startswith("compat.NOT_IN_EVERY_RELEASE: vllm.core:Engine.run")


def _copy(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Copies our package and replaces a pattern in each of the given files; every pattern must match."""
    package = folder / "vllm_backplane"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file, (old, new) in changes.items():
        text, count = re.subn(old, new, (package / file).read_text())
        assert count > 0, (file, old)
        (package / file).write_text(text)
    return package


# --- one place for versions


def test_versions_are_stated_in_one_place() -> None:
    """The Makefile cannot import settings/releases.py, so its versions are compared."""
    declared = dict(re.findall(r"^(VLLM_VERSION|TORCH_VERSION) := (\S+)$", (ROOT / "Makefile").read_text(), re.M))
    assert declared == {"VLLM_VERSION": NEWEST.version, "TORCH_VERSION": NEWEST.torch}
    for path in ("pyproject.toml", "benchmarks/compare/environments.py"):
        assert set(re.findall(r"torch==([\d.]+)", (ROOT / path).read_text())) == {NEWEST.torch}, path
    assert [release.coverage == FULL for release in RELEASES] == [release is NEWEST for release in RELEASES]


def test_differences_are_looked_up_in_compat_alone() -> None:
    """Only settings/, commands that report versions, and checks that run before vLLM is imported depend on its version;
    others call compat.

    `compat.vllm_version()` is allowed: peers exchange it.
    """
    readers = ("doctor/", "cli/", "early_checks/", "settings/compat.py", "settings/releases.py")
    looks = re.compile(r"vllm\.__version__|installed_version|in_range\(|(?<!compat\.)vllm_version|VLLM_VERSION")
    found = [
        file.relative_to(PACKAGE).as_posix()
        for file in sorted(PACKAGE.rglob("*.py"))
        if not file.relative_to(PACKAGE).as_posix().startswith(readers) and looks.search(file.read_text())
    ]
    assert found == []
