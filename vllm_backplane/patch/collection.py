"""Which patches there are: ours, and those of any distribution that announces a package of them.

A package of patches has the folders ``platform``, ``engine`` and ``worker`` with files ``patch_<module>.py``; a
distribution announces it in the entry-point group ``vllm_backplane.patches``. Another plugin can use this engine
without Backplane's platform: `PatchSet.of_package("its.package")`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points

from vllm_backplane.errors import PatchError, nearest
from vllm_backplane.patch.declaration import Patch, Process, patches_of

ENTRY_POINT_GROUP = "vllm_backplane.patches"
OWN_PACKAGE = "vllm_backplane.patch"


@dataclass(frozen=True, slots=True)
class PatchSet:
    patches: tuple[Patch, ...]

    @classmethod
    def of_package(cls, package: str) -> PatchSet:
        """Every patch of a package, checked for what can be wrong between patches."""
        return cls(tuple(_of_package(package))).checked()

    @classmethod
    def installed(cls) -> PatchSet:
        """Ours and those of every distribution that announces some."""
        found = list(_of_package(OWN_PACKAGE))
        for point in entry_points(group=ENTRY_POINT_GROUP):
            found += _of_package(point.value)
        return cls(tuple(found)).checked()

    def checked(self) -> PatchSet:
        names: dict[str, Patch] = {}
        for patch in self.patches:
            if patch.name in names:
                raise PatchError(f"two patches are called {patch.name!r}: {patch.module}, {names[patch.name].module}")
            names[patch.name] = patch
        for patch in self.patches:
            if patch.after is not None:
                other = names.get(patch.after)
                if other is None or other.target != patch.target:
                    raise PatchError(f"{patch.name} goes after {patch.after!r}, which is no patch of the same target")
        _refuse_rivals(self.patches)
        return self

    def get(self, name: str) -> Patch:
        for patch in self.patches:
            if patch.name == name:
                return patch
        names = [patch.name for patch in self.patches]
        raise PatchError(f"no patch {name!r}{nearest(name, names)} There are: {', '.join(names) or 'none'}.")

    def of(self, process: Process) -> tuple[Patch, ...]:
        """The patches of a process, in an order that puts each one after the one it names."""
        return tuple(_ordered([patch for patch in self.patches if patch.process is process]))


def _of_package(package: str) -> Iterator[Patch]:
    for process in Process:
        folder = f"{package}.{process.value}"
        try:
            found = importlib.import_module(folder)
        except ModuleNotFoundError as fault:
            if fault.name != folder:
                raise
            continue  # a package need not have patches for every process
        for info in pkgutil.iter_modules(found.__path__):
            if not info.name.startswith("patch_"):
                raise PatchError(f"{folder}.{info.name} is not called patch_<module>; rename it or move it elsewhere")
            module = importlib.import_module(f"{folder}.{info.name}")
            patches = patches_of(vars(module))
            if not patches:
                raise PatchError(f"{module.__name__} declares no patch; remove it")
            for patch in patches:
                if patch.module == module.__name__:  # not one that was imported to be named
                    if patch.process is not process:
                        raise PatchError(f"{patch.name} is for {patch.process.value} and lies in {folder}; move it")
                    yield patch


def _refuse_rivals(patches: Iterable[Patch]) -> None:
    by_target: dict[str, list[Patch]] = {}
    for patch in patches:
        by_target.setdefault(patch.target, []).append(patch)
    for target, rivals in by_target.items():
        first = [patch for patch in rivals if patch.after is None]
        followed = [patch.after for patch in rivals if patch.after is not None]
        if len(first) != 1 or len(set(followed)) != len(followed):
            names = ", ".join(patch.name for patch in rivals)
            raise PatchError(
                f"several patches on {target} ({names}) and no one order: say after=… on all but the first"
            )


def _ordered(patches: list[Patch]) -> list[Patch]:
    ordered: list[Patch] = []
    while len(ordered) < len(patches):
        placed = {patch.name for patch in ordered}
        waiting = {patch.name for patch in patches} - placed
        ready = [p for p in patches if p.name in waiting and (p.after is None or p.after not in waiting)]
        if not ready:
            raise PatchError(f"patches wait for each other: {', '.join(sorted(waiting))}")
        ordered += ready
    return ordered
