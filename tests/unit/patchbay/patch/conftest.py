"""Provides a small package to patch. It is written to disk and imported, so that it has source and live objects."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import Patch, PatchSession, PatchSet, Process, take_fingerprint
from vllm_patchbay.upstream import SymbolIndex
from vllm_patchbay.upstream.source import FolderTree

FILES = {
    "__init__.py": "",
    "core.py": '''
LIMIT = 7
OTHER = 7

def double(x, *, by=2):
    """Twice."""
    return x * by

class Base:
    def inherited(self):
        return "base"

class Engine(Base):
    size = 3
    def run(self, x, flag=False):
        return ("run", x, flag)
    @staticmethod
    def helper(x):
        return x + 1
    @classmethod
    def make(cls, x=0):
        return (cls.__name__, x)
    @property
    def name(self):
        return "engine"
''',
    "user.py": """
from host_package.core import LIMIT, Engine, double
from .core import double as twice
SEVEN = 7

def use(x):
    return double(x), twice(x), LIMIT, SEVEN, Engine().run(1)
""",
    "late.py": """
def feature():
    return "plain"
""",
}

FIELDS: dict[str, Any] = {
    "process": Process.WORKER,
    "versions": ">=1,<2",
    "why": "a reason",
    "how": "a way",
    "upstream": "https://example.org/1",
    "remove_when": "it is fixed.",
}


class Host:
    """Provides the package, its index and patches. A patch gets the right fingerprint unless one is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = "1.0"
        self.sessions: list[PatchSession] = []

    @property
    def index(self) -> SymbolIndex:
        return SymbolIndex(FolderTree(self.folder, version=self.version, package="host_package"))

    def fingerprint(self, target: str) -> str:
        module, _, name = target.partition(":")
        return str(take_fingerprint(self.index.normalized_source_of(module, name)))

    def patch(self, name: str, **changes: Any) -> Patch:
        target = f"host_package.{name}"
        known = changes.pop("fingerprints", None) or {"1.0": self.fingerprint(target)}
        return Patch(target=target, fingerprints=known, **{**FIELDS, **changes})

    def session(self, **settings: Any) -> PatchSession:
        self.sessions.append(PatchSession(lambda: self.index, self.version, **settings))
        return self.sessions[-1]

    def module(self, name: str) -> Any:
        return importlib.import_module(f"host_package.{name}")

    def rewrite(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    folder = tmp_path / "host_package"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    host = Host(folder)
    yield host
    for session in host.sessions:
        with suppress(PatchError):  # one test leaves a change that cannot be undone
            session.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == "host_package"]:
        del sys.modules[name]


def applied(host: Host, *patches: Patch, **settings: Any) -> PatchSession:
    """Returns a session that has applied the patches."""
    session = host.session(**settings)
    session.apply(PatchSet(patches).checked(), Process.WORKER)
    return session
