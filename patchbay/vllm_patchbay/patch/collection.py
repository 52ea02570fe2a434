"""Finds the patches of a package, or of every distribution that announces a package of patches.

A package of patches has the folders ``platform``, ``engine`` and ``worker`` with files ``patch_<module>.py``. A plugin
applies its own by `PatchSet.of_package("its.package")`, and announces them in the entry-point group
``vllm_patchbay.patches`` so that ``vllm-patchbay list`` and ``check`` find them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.abc import InspectLoader
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from vllm_patchbay.errors import PatchError, nearest
from vllm_patchbay.patch.declaration import Patch, Process, patches_of
from vllm_patchbay.patch.deferral import waits_for

ENTRY_POINT_GROUP = "vllm_patchbay.patches"


@dataclass(frozen=True, slots=True)
class PatchFile:
    """A module of patches."""

    module: str
    process: Process
    waits_for: tuple[str, ...]
    """Modules of vLLM before whose import nothing of it is needed; empty for a file that is always needed."""

    def load(self) -> list[Patch]:
        try:
            module = importlib.import_module(self.module)
        except PatchError as fault:
            raise PatchError(f"{self.module}: {fault}") from fault
        except Exception as fault:
            raise PatchError(f"{self.module} cannot be loaded: {type(fault).__name__}: {fault}") from fault
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
    faults: Mapping[str, PatchError] = field(default_factory=dict)
    """Files that could not be loaded, and why."""

    @classmethod
    def of_package(cls, package: str) -> PatchSet:
        """The patches of a package, to apply: checked for what can be wrong between patches, and those of one model or
        feature left for when it is loaded. An error if a file of the others cannot be loaded."""
        return cls.of_packages([package], leave_features=True).whole()

    @classmethod
    def of_packages(
        cls, packages: Iterable[str], *, leave_features: bool = False, may_be_empty: Container[str] = ()
    ) -> PatchSet:
        """Returns what can be loaded of some packages, and in `faults` what cannot. A package without patches is an
        error unless `may_be_empty` has it."""
        files = [file for package in packages for file in _files(package, may_be_empty=package in may_be_empty)]
        left = [file for file in files if leave_features and file.waits_for]
        patches: list[Patch] = []
        faults = {}
        for file in files:
            if file not in left:
                try:
                    patches += file.load()
                except PatchError as fault:
                    faults[file.module] = fault
        found = cls(tuple(patches), tuple(left), faults)
        return found if faults else found.checked()  # what another patch refers to may be among what is missing

    @classmethod
    def announced(cls) -> PatchSet:
        """Returns the patches of every installed distribution that announces some; as `of_packages`."""
        return cls.of_packages(announced_packages())

    def whole(self) -> PatchSet:
        """Itself; an error if a file could not be loaded."""
        if self.faults:
            raise PatchError("\n".join(map(str, self.faults.values())))
        return self

    def __bool__(self) -> bool:
        return bool(self.patches or self.features)

    def checked(self) -> PatchSet:
        names = refuse_namesakes(self.patches)
        for patch in self.patches:
            if patch.after is not None:
                other = names.get(patch.after)
                if other is None or other.target != patch.target:
                    raise PatchError(f"{patch.name} goes after {patch.after!r}, which is no patch of the same target")
                _refuse_later(patch, other)
        _refuse_rivals(self.patches)
        return self

    def get(self, name: str) -> Patch:
        for patch in self.patches:
            if patch.name == name:
                return patch
        self.whole()
        names = [patch.name for patch in self.patches]
        raise PatchError(f"no patch {name!r}{nearest(name, names)} There are: {', '.join(names) or 'none'}.")

    def of(self, process: Process) -> tuple[Patch, ...]:
        """The patches of a process, in an order that puts each one after the one it names."""
        return tuple(ordered([patch for patch in self.patches if patch.process is process]))


def announced_packages(group: str = ENTRY_POINT_GROUP) -> list[str]:
    """Returns the packages of patches that installed distributions announce in an entry-point group."""
    return [point.value for point in entry_points(group=group)]


def _files(package: str, *, may_be_empty: bool) -> list[PatchFile]:
    """A package need not have patches for every process, but anything that looks like a patch has to be where it is
    found."""
    processes = {process.value: process for process in Process}
    files = []
    for name in _below(package):
        folder = f"{package}.{name}"
        if name.startswith("patch_"):
            raise PatchError(f"{folder} lies beside the folders; move it into one of {', '.join(processes)}")
        inside = _below(folder) if _folders(folder) else []
        for file in inside:
            if name in processes and not file.startswith("patch_"):
                raise PatchError(f"{folder}.{file} is not called patch_<module>; rename it or move it elsewhere")
            if name not in processes and file.startswith("patch_"):
                raise PatchError(f"{folder}.{file} is in no folder of a process; move it to {', '.join(processes)}")
        if name in processes:
            modules = [f"{folder}.{file}" for file in inside]
            files += [PatchFile(module, processes[name], waits_for(_source(module))) for module in modules]
    if not files and not may_be_empty:
        raise PatchError(
            f"{package} has no patches: there is no patch_<module>.py in a folder {', '.join(processes)} of it"
        )
    return sorted(files, key=lambda file: (list(Process).index(file.process), file.module))


def _below(package: str) -> list[str]:
    """Names of the modules and packages in a package; it is found and not imported."""
    path = _folders(package)
    if path is None:
        raise PatchError(f"there is no package {package!r} here; install it, or name one that has patches")
    # Also folders without __init__.py, which Python imports and pkgutil passes over.
    bare = {
        child.name
        for folder in map(Path, path)
        if folder.is_dir()
        for child in folder.iterdir()
        if child.is_dir() and child.name.isidentifier() and next(child.glob("*.py"), None) is not None
    }
    return sorted({info.name for info in pkgutil.iter_modules(path)} | bare)


def _folders(package: str) -> list[str] | None:
    """Where the modules of a package are; None if it is no package."""
    try:
        spec = find_spec(package)
    except Exception as fault:  # of a package that has it in it
        raise PatchError(f"the package {package!r} cannot be imported: {type(fault).__name__}: {fault}") from fault
    return list(spec.submodule_search_locations or ()) or None if spec is not None else None


def _source(module: str) -> str:
    spec = find_spec(module)
    loader = spec.loader if spec is not None else None
    try:
        return (loader.get_source(module) if isinstance(loader, InspectLoader) else None) or ""
    except ImportError:  # not text; loading it says so better
        return ""


def refuse_namesakes(patches: Iterable[Patch]) -> dict[str, Patch]:
    """The patches by name."""
    names: dict[str, Patch] = {}
    for patch in patches:
        if patch.name in names:
            raise PatchError(f"two patches are called {patch.name!r}: {patch.module}, {names[patch.name].module}")
        names[patch.name] = patch
    return names


def _refuse_later(patch: Patch, before: Patch) -> None:
    """What a patch goes after has to be applied by then."""
    processes = list(Process)
    if processes.index(before.process) > processes.index(patch.process):
        raise PatchError(
            f"{patch.name} is for {patch.process.value} and goes after {before.name}, which is for "
            f"{before.process.value} and applied later; turn the order round, or give both one process"
        )
    if before.on_import and not patch.on_import:
        raise PatchError(
            f"{patch.name} goes after {before.name}, which waits for its module; say on_import=True for both or none"
        )


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


def ordered(patches: list[Patch]) -> list[Patch]:
    """Each one after the one it names."""
    result: list[Patch] = []
    while len(result) < len(patches):
        placed = {patch.name for patch in result}
        waiting = {patch.name for patch in patches} - placed
        ready = [p for p in patches if p.name in waiting and (p.after is None or p.after not in waiting)]
        if not ready:
            raise PatchError(f"patches wait for each other: {', '.join(sorted(waiting))}")
        result += ready
    return result
