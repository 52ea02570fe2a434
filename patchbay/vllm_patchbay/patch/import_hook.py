"""Runs a function when a module, or each module of a package, has been imported: at once, or after a later import.

Patches use it to wait for the module of their target.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

Action = Callable[[], None]
ModuleAction = Callable[[ModuleType], None]


class _Watcher(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the modules that actions wait for. It is first in ``sys.meta_path``, and the other finders
    find the modules."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}
        self.packages: dict[str, list[ModuleAction]] = {}

    def actions(self, module: str) -> list[ModuleAction]:
        """Returns the actions for all modules of the top-level package to which a module belongs."""
        return self.packages.get(module.partition(".")[0], [])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting and not self.actions(fullname):
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
    """Runs the waiting actions after the module's own loader has executed it."""

    def __init__(self, loader: importlib.abc.Loader, watcher: _Watcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # get_source, get_filename and others that tools use

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        for every in list(self._watcher.actions(module.__name__)):
            every(module)
        for action in list(self._watcher.waiting.get(module.__name__, ())):
            # An action that raises fails this import and stays registered: a second import must not succeed without it.
            action()
        self._watcher.waiting.pop(module.__name__, None)


class _PendingSpec(importlib.machinery.ModuleSpec):
    """Runs actions at the end of an import that is in progress. The import system records that end only in the spec, by
    setting ``_initializing`` to False."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            actions: list[Action] = self.__dict__.pop("_actions")
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            while actions:
                try:
                    when_imported(self.name, actions[0])  # after a failed import, the action waits for the next
                except BaseException:
                    # As in _Loader: this import fails, and the next must not succeed without the remaining actions.
                    sys.modules.pop(self.name, None)
                    for action in actions:
                        when_imported(self.name, action)
                    raise
                actions.pop(0)


_watcher = _Watcher()


def when_imported(module: str, action: Action) -> None:
    """Calls `action` at once if the module has been imported, else right after its import."""
    present = sys.modules.get(module)
    spec = present.__spec__ if present is not None else None
    if spec is not None and getattr(spec, "_initializing", False):
        if not isinstance(spec, _PendingSpec):
            spec.__class__ = _PendingSpec
        spec.__dict__.setdefault("_actions", []).append(action)
    elif present is not None:
        action()
    else:
        _start_watching()
        _watcher.waiting.setdefault(module, []).append(action)


def for_each_module(package: str, action: ModuleAction) -> None:
    """Calls `action` with each imported module of a top-level package, and with every other one after its import."""
    _start_watching()
    _watcher.packages.setdefault(package, []).append(action)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            when_imported(name, partial(action, module))


def _start_watching() -> None:
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
