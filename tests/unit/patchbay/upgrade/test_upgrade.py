"""The upgrade report names what breaks, what changed beneath a plugin, and what is new, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_patchbay.cli import main
from vllm_patchbay.upgrade import Item, Section, Upgrade, upgrade
from vllm_patchbay.upgrade.markdown import as_markdown
from vllm_patchbay.upstream.source import FolderTree

BEFORE = {
    "__init__.py": "__version__ = '0.1.0'\n",
    "helpers.py": "def moved(): ...\ndef stays(): ...\n",
    "envs.py": """
import os
A = os.environ.get('VLLM_OLD')
B = os.environ.get('VLLM_USED')
environment_variables = {
    'VLLM_EAGER': lambda: bool(int(os.getenv('VLLM_EAGER', '0'))),
    'VLLM_LIMIT': lambda: int(os.getenv('VLLM_LIMIT', '5')),
    'VLLM_SAME': lambda: os.getenv('VLLM_SAME', 'a').lower(),
}
""",
    "config/__init__.py": """
class Config:
    size: int = 1
    depth: int = 2

class CacheConfig:
    blocks: int = 1
    tier: str | None = None

class Whole:
    cache: CacheConfig
""",
    "engine/arg_utils.py": """
from vllm.config import CacheConfig
class EngineArgs:
    blocks: int = CacheConfig.blocks
""",
    "worker.py": """
from abc import ABC, abstractmethod

class Base(ABC):
    @abstractmethod
    def run(self): ...

class Worker(Base):
    def run(self):
        return self.step() + 1

    def step(self):
        return 1

    def idle(self):
        return 0

    def rest(self):
        return 9

    def leave(self):
        return 10

def schedule(queue):
    return queue[0]

def moves():
    return 1

def sample(logits):
    return max(logits)

def admit(request, limit):
    return request

def drain(queue):
    while queue:
        queue.pop(0)
""",
    "layers.py": """
class CustomOp:
    @classmethod
    def register_oot(cls, op=None, name=None): ...

class Norm(CustomOp):
    def forward_native(self, x):
        return x

class Gate(CustomOp):
    def forward_native(self, x):
        return x

class Turn(CustomOp):
    def forward_native(self, x):
        return -x
""",
}
AFTER = {
    "elsewhere.py": "def moves():\n    return 1\n",
    "__init__.py": "__version__ = '0.2.0'\n",
    "helpers.py": "from vllm.new_helpers import stays\n",
    "new_helpers.py": "def moved(): ...\ndef stays(): ...\n",
    "envs.py": """
import os
A = os.environ.get('VLLM_NEW')
environment_variables: dict = {
    'VLLM_EAGER': lambda: bool(int(os.getenv('VLLM_EAGER', '1'))),
    'VLLM_LIMIT': lambda: int(os.getenv('VLLM_LIMIT', '6')),
    'VLLM_SAME': lambda: os.getenv('VLLM_SAME', 'a').upper(),
    'VLLM_STRICT': lambda: os.getenv('VLLM_STRICT', 'True').lower() in ('true', '1'),
    'VLLM_BODY': lambda: int(os.environ.get('VLLM_BODY', str(4 * 8))),
}
""",
    "config/__init__.py": """
class Config:
    size: int = 4
    width: int = 3
    sure: bool = Field(default=True)

class CacheConfig:
    blocks: int = 9
    tier: str | None = None
    spill: bool = False

class Whole:
    cache: CacheConfig
""",
    "engine/arg_utils.py": """
from vllm.config import CacheConfig
class EngineArgs:
    blocks: int = CacheConfig.blocks
    spill: bool = get_field(CacheConfig, 'spill')
    tier: str | None = CacheConfig.tier
""",
    "worker.py": """
from abc import ABC, abstractmethod

class Base(ABC):
    @abstractmethod
    def run(self): ...
    @abstractmethod
    def stop(self): ...
    @abstractmethod
    def pause(self): ...

class Worker(Base):
    def run(self):
        return self.step() + 1

    def step(self):
        # another comment
        return 2

    def idle(self):
        # the same
        return 0

    def rest(self):
        return 99

    def pause(self):
        '''Stops work for a while.

        More.'''

from vllm.elsewhere import moves

def schedule(queue):
    # fixed: https://example.org/issues/77
    return queue[-1]

def sample(logits):
    return min(logits)

def admit(request, limit):
    if request.size > limit:
        raise ValueError(request.size)
    return request

def drain(queue):
    queue.clear()
""",
    "layers.py": """
class CustomOp:
    @classmethod
    def register_oot(cls, op=None, name=None): ...

class Norm(CustomOp):
    def forward_native(self, x):
        return x + 1

class Gate(CustomOp):
    def forward_native(self, x):
        return x

from vllm.turns import Turn
""",
    "turns.py": """
from vllm.layers import CustomOp

class Turn(CustomOp):
    def forward_native(self, x):
        return 1 - x
""",
}
PLUGIN = {
    "__init__.py": "",
    "work.py": """
import os
from vllm.helpers import moved, stays
from vllm.worker import Worker

USED = os.environ.get("VLLM_USED") or os.environ.get("VLLM_LIMIT")

def blocks(vllm_config):
    return vllm_config.cache.blocks

class Rests:
    def rest(self):
        return 7

class OurWorker(Rests, Worker):
    def leave(self):
        return 6

    def step(self):
        return super().step()

    def idle(self):
        return 5
""",
    "layers.py": """
from vllm.layers import CustomOp, Turn

@CustomOp.register_oot(name="Norm")
class OurNorm:
    def forward_oot(self, x):
        return x

@Turn.register_oot()
class OurTurn(Turn):
    def forward_oot(self, x):
        return x

@CustomOp.register_oot(name="Gate")
class OurGate:
    def forward_oot(self, x):
        return x
""",
    "patches.py": """
from vllm_patchbay.patch import Patch, Process
from plugin.guards import guarded

@Patch(target="vllm.worker:schedule", process=Process.ENGINE, versions=">=0.1,<0.2", why="w", how="h",
       upstream="https://example.org/issues/77", remove_when="the worker stops for a while by itself",
       fingerprints={"0.1.0": "0" * 16})
def schedule(queue): ...

@Patch(target="vllm.worker:admit", process=Process.ENGINE, versions=">=0.1", why="w", how="h", upstream="none: own",
       remove_when="large requests are refused", fixed_if=("vllm.worker:admit", "request.size > limit"),
       fingerprints={"0.1.0": "0" * 16})
def admit(request, limit):
    # refuses large requests
    if request.size > limit:
        raise ValueError(request.size)
    return admit.original(request, limit)

@Patch(target="vllm.worker:drain", process=Process.ENGINE, versions=">=0.1", why="w", how="h", upstream="none: own",
       remove_when="it is fast", faulty_while=("vllm.worker:drain", "queue.pop(0)"),
       fingerprints={"0.1.0": "0" * 16})
def drain(queue):
    while queue: queue.pop()

@guarded("vllm.worker:sample", "vllm.worker:moves", why="an operator draws")
def sample(): ...

@guarded("vllm.worker:gone_long_ago", why="only older releases have it", versions="<0.2")
def old(): ...
""",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def report(tmp_path: Path) -> Upgrade:
    before, after = (
        FolderTree(write(tmp_path / version / "vllm", files), version)
        for version, files in (("0.1.0", BEFORE), ("0.2.0", AFTER))
    )
    return upgrade(write(tmp_path / "plugin", PLUGIN), before, after)


def subjects(report: Upgrade, section: Section) -> set[str]:
    return {item.subject for item in report.of(section)}


def test_what_breaks(report: Upgrade) -> None:
    found = {item.subject: item for item in report.of(Section.BREAKS)}
    assert set(found) == {
        "vllm.helpers has no moved", "vllm.worker:Base.stop", "vllm.worker:moves", "vllm.worker:Worker.leave",
    }  # fmt: skip
    assert "is defined as vllm.elsewhere:moves now" in found["vllm.worker:moves"].what
    assert "nothing calls the override" in found["vllm.worker:Worker.leave"].what
    assert "moved is now in vllm.new_helpers" in found["vllm.helpers has no moved"].what
    assert found["vllm.helpers has no moved"].places == ("work.py:3",)
    assert "OurWorker does not define it" in found["vllm.worker:Base.stop"].what  # pause is defined by Worker
    assert report.breaks


def test_what_changed_beneath(report: Upgrade) -> None:
    found = {item.subject: item for item in report.of(Section.CHANGED)}
    ours = {subject for subject in found if not subject.startswith("OurWorker")}
    assert ours == {
        "vllm.worker:Worker.step", "vllm.worker:Worker.rest", "vllm.worker:schedule", "vllm.worker:sample", "VLLM_USED",
        "vllm.layers:Norm", "vllm.turns:Turn", "vllm.worker:admit", "vllm.worker:drain", "VLLM_LIMIT",
        "vllm.config:CacheConfig.blocks",
    }  # fmt: skip
    assert found["vllm.worker:Worker.rest"].places == ("work.py:12",)  # of a mixin
    assert "the plugin overrides it" in found["vllm.worker:Worker.step"].what
    assert "registers a replacement for it" in found["vllm.layers:Norm"].what
    assert found["vllm.layers:Norm"].places == ("layers.py:4",)
    assert "and was vllm.layers:Turn" in found["vllm.turns:Turn"].what
    assert "return 2" in found["vllm.worker:Worker.step"].diff
    assert "(an operator draws)" in found["vllm.worker:sample"].what
    texts = [item.what for item in report.of(Section.CHANGED) if item.subject == "vllm.worker:schedule"]
    assert any("a patch replaces it" in text for text in texts)
    assert any("decide whether it is still needed" in text for text in texts)


def may_go(report: Upgrade, subject: str) -> list[Item]:
    return [item for item in report.of(Section.MAY_GO) if item.subject == subject]


def test_a_patch_may_go_if_its_issue_is_mentioned(report: Upgrade) -> None:
    [item] = may_go(report, "vllm.worker:schedule")
    assert "issue 77" in item.what and "vllm.worker" in item.what and "by itself" in item.what


def test_a_patch_may_go_if_a_fix_that_mentions_no_issue_is_there(report: Upgrade) -> None:
    assert subjects(report, Section.MAY_GO) == {"vllm.worker:schedule", "vllm.worker:admit", "vllm.worker:drain"}
    declared, adopted = may_go(report, "vllm.worker:admit")
    assert declared.what == (
        "seems to be fixed: vllm.worker:admit has 'request.size > limit' now (fixed_if): see whether the patch may go "
        "(when: large requests are refused)"
    )
    assert "lines of the replacement" in adopted.what
    assert adopted.diff == "  +if request.size > limit:\n  +raise ValueError(request.size)"
    [gone] = may_go(report, "vllm.worker:drain")
    assert "vllm.worker:drain does not have 'queue.pop(0)' now (faulty_while)" in gone.what


def test_what_is_new(report: Upgrade) -> None:
    assert subjects(report, Section.HOOKS) == {
        "vllm.worker:Worker.pause", "vllm.worker:Base.stop", "vllm.worker:Base.pause",
    }  # fmt: skip
    [pause] = [item for item in report.of(Section.HOOKS) if item.subject == "vllm.worker:Worker.pause"]
    assert pause.what == (
        "is a new method: Stops work for a while; it may replace the patch of vllm.worker:schedule, which goes when: "
        "the worker stops for a while by itself (stop, while)"
    )
    [stop] = [item for item in report.of(Section.HOOKS) if item.subject == "vllm.worker:Base.stop"]
    assert "replace" not in stop.what


def test_settings_to_decide_about_come_first(report: Upgrade) -> None:
    found = [(item.subject, item.what) for item in report.of(Section.SETTINGS)]
    rest = (
        "new: `VLLM_BODY=str(4 * 8)`, `VLLM_NEW`, `Config.width=3`, `EngineArgs.tier`; gone: `VLLM_OLD`, `Config.depth`"
    )
    assert found == [
        ("VLLM_EAGER", "has the default '1' now, and had '0'"),
        ("vllm.config:Config.size", "has the default 4 now, and had 1"),
        ("vllm.engine.arg_utils:EngineArgs.blocks", "has the default 9 now, and had 1"),
        ("VLLM_STRICT", "is a new environment variable with the default 'True'"),
        ("vllm.config:Config.sure", "is a new field: sure: bool = Field(default=True)"),
        ("vllm.config:CacheConfig.spill", "is a new field: spill: bool = False"),
        (
            "6 that the plugin does not read, and no new one is on by default",
            rest,
        ),
    ]


def test_defaults_that_the_plugin_reads_changed_beneath_it(report: Upgrade) -> None:
    found = {item.subject: item.what for item in report.of(Section.CHANGED)}
    assert found["VLLM_LIMIT"] == "has the default '6' now, and had '5'; the plugin reads it"
    assert found["vllm.config:CacheConfig.blocks"] == "has the default 9 now, and had 1; the plugin reads it"
    assert found["VLLM_USED"] == "is not read any more, and the plugin uses it"


def test_the_same_release_has_no_tasks(tmp_path: Path) -> None:
    tree = FolderTree(write(tmp_path / "vllm", BEFORE), "0.1.0")
    found = upgrade(write(tmp_path / "plugin", PLUGIN), tree, FolderTree(tree.folder, "0.1.0"))
    assert found.items == ()
    assert "Nothing was found" in as_markdown(found)


def test_markdown(report: Upgrade) -> None:
    page = as_markdown(report)
    assert page.startswith(f"# {report.path}: from vLLM 0.1.0 to 0.2.0\n")
    assert "| Breaks for certain | 4 |" in page
    assert "- [ ] `vllm.worker:Worker.step` changed, and the plugin overrides it — work.py:19\n\n  ```diff\n" in page
    assert "```" not in as_markdown(report, diffs=False)
    many = Upgrade("p", "1", "2", (Item(Section.BREAKS, "x", "is gone", tuple(f"f:{n}" for n in range(9))),))
    assert "f:5 and 3 more" in as_markdown(many)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees = {"0.1.0": write(tmp_path / "a" / "vllm", BEFORE), "0.2.0": write(tmp_path / "b" / "vllm", AFTER)}
    before, after = (f"{version}@{folder}" for version, folder in trees.items())
    plugin = str(write(tmp_path / "plugin", PLUGIN))
    where = ["--from", before, "--to", after]
    page = tmp_path / "page.md"
    assert main(["upgrade", plugin, *where, "--json", "--output", str(page)]) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["from"], report["to"]) == ("0.1.0", "0.2.0")
    assert {item["section"] for item in report["items"]} == {each.name.lower() for each in Section}
    assert "4 breaks for certain" in shown.err and page.read_text().startswith("# ")
    assert main(["upgrade", plugin, "--from", before, "--to", before]) == 0
    assert main(["upgrade", plugin, "--to", str(tmp_path / "nowhere")]) == 2
    assert "vllm-patchbay: error: " in capsys.readouterr().err
