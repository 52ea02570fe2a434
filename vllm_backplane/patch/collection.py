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
from importlib.abc import InspectLoader
from importlib.metadata import entry_points
from importlib.util import find_spec

from vllm_backplane.errors import PatchError, nearest
from vllm_backplane.patch.declaration import Patch, Process, patches_of
from vllm_backplane.patch.deferral import waits_for

ENTRY_POINT_GROUP = "vllm_backplane.patches"
OWN_PACKAGE = "vllm_backplane.patch"


@dataclass(frozen=True, slots=True)
class PatchFile:
    """A module of patches."""

    module: str
    process: Process
    waits_for: tuple[str, ...]
    """Modules of vLLM before whose import nothing of it is needed; empty for a file that is always needed."""

    def load(self) -> list[Patch]:
        module = importlib.import_module(self.module)
        patches = patches_of(vars(module))
        if not patches:
            raise PatchError(f"{self.module} declares no patch; remove it")
        own = [patch for patch in patches if patch.module == self.module]  # not one that was imported to be named
        for patch in own:
            if patch.process is not self.process:
                folder = self.module.rpartition(".")[0]
                raise PatchError(f"{patch.name} is for {patch.process.value} and lies in {folder}; move it")
        return own


@dataclass(frozen=True, slots=True)
class PatchSet:
    patches: tuple[Patch, ...]
    features: tuple[PatchFile, ...] = ()
    """Files of patches that are left for when their feature is loaded."""

    @classmethod
    def of_package(cls, package: str) -> PatchSet:
        """Every patch of a package, checked for what can be wrong between patches."""
        return cls.of_packages([package])

    @classmethod
    def of_packages(cls, packages: Iterable[str], *, leave_features: bool = False) -> PatchSet:
        files = [file for package in packages for file in _files(package)]
        left = [file for file in files if leave_features and file.waits_for]
        return cls(tuple(patch for file in files if file not in left for patch in file.load()), tuple(left)).checked()

    @classmethod
    def installed(cls, *, leave_features: bool = False) -> PatchSet:
        """Ours and those of every distribution that announces some."""
        announced = [point.value for point in entry_points(group=ENTRY_POINT_GROUP)]
        return cls.of_packages([OWN_PACKAGE, *announced], leave_features=leave_features)

    def __bool__(self) -> bool:
        return bool(self.patches or self.features)

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


def _files(package: str) -> Iterator[PatchFile]:
    for process in Process:
        folder = f"{package}.{process.value}"
        try:
            found = importlib.import_module(folder)
        except ModuleNotFoundError as fault:
            if fault.name != folder:
                raise
            continue  # a package need not have patches for every process
        for info in pkgutil.iter_modules(found.__path__):
            module = f"{folder}.{info.name}"
            if not info.name.startswith("patch_"):
                raise PatchError(f"{module} is not called patch_<module>; rename it or move it elsewhere")
            yield PatchFile(module, process, waits_for(_source(module)))


def _source(module: str) -> str:
    spec = find_spec(module)
    source = spec.loader.get_source(module) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    return source or ""


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
