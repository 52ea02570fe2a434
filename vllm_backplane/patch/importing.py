"""Runs a function when a module has been imported, now or later: for patches that belong to one model or feature."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Action = Callable[[], None]


class _Watcher(importlib.abc.MetaPathFinder):
    """Stands first on the path, finds nothing by itself, and wraps the loader of the modules it waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self)
                    return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, watcher: _Watcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # get_source, get_filename and others that tools ask for

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        for action in list(self._watcher.waiting.get(module.__name__, ())):
            # One that raises ends this import, and stays: a second import must not succeed without it.
            action()
        self._watcher.waiting.pop(module.__name__, None)


_watcher = _Watcher()


def when_imported(module: str, action: Action) -> bool:
    """Call `action` at once if the module is there, else right after it has been imported.

    False if the module is half way through its import: its end cannot be waited for, so ask again later.
    """
    present = sys.modules.get(module)
    if present is not None:
        if getattr(present.__spec__, "_initializing", False):
            return False
        action()
        return True
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    _watcher.waiting.setdefault(module, []).append(action)
    return True
