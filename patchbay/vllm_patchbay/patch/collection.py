"""Finds and loads the patches of a package, or of every package that an installed distribution announces.

A package of patches has the folders ``platform``, ``engine`` and ``worker`` with files ``patch_<module>.py``. A plugin
applies its own by `PatchSet.of_package("its.package")`, and announces them in the entry-point group
``vllm_patchbay.patches`` so that ``vllm-patchbay list`` and ``check`` find them.

A file whose patches all have ``on_import=True`` belongs to one model or feature. To apply patches, such a file is not
loaded before its target is imported: the file may need the feature itself, and an error in it must not affect users who
do not use the feature. Whether a file is deferred is therefore read from its source.
"""

from __future__ import annotations

import ast
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

ENTRY_POINT_GROUP = "vllm_patchbay.patches"


@dataclass(frozen=True, slots=True)
class PatchFile:
    """Locates a module that declares patches."""

    module: str
    process: Process
    waits_for: tuple[str, ...]
    """Modules of vLLM whose import makes the file necessary; empty for a file that is always necessary."""

    def load(self) -> list[Patch]:
        """Imports the module and returns its patches. Raises PatchError if that fails, or if it declares none."""
        try:
            module = importlib.import_module(self.module)
        except PatchError as fault:
            raise PatchError(f"{self.module}: {fault}") from fault
        except Exception as fault:
            raise PatchError(f"{self.module} cannot be loaded: {type(fault).__name__}: {fault}") from fault
        patches = patches_of(vars(module))
        if not patches:
            raise PatchError(f"{self.module} declares no patch; remove it")
        own = [patch for patch in patches if patch.module == self.module]  # without patches that it imports
        for patch in own:
            if patch.process is not self.process:
                folder = self.module.rpartition(".")[0]
                raise PatchError(
                    f"{patch.name} is for the process {patch.process.value!r} and its file is in {folder}; move the "
                    "file, or change its process"
                )
        return own


@dataclass(frozen=True, slots=True)
class PatchSet:
    """Holds patches that are listed, checked or applied together."""

    patches: tuple[Patch, ...]
    deferred: tuple[PatchFile, ...] = ()
    """Files that are loaded when the feature that they patch is imported."""
    faults: Mapping[str, PatchError] = field(default_factory=dict)
    """Errors of the files that could not be loaded, by module."""

    @classmethod
    def of_package(cls, package: str) -> PatchSet:
        """Returns the patches of a package for `PatchSession.apply`, with those of one model or feature deferred.

        Raises PatchError if a file that is not deferred cannot be loaded, or if patches conflict.
        """
        return cls.of_packages([package], defer_features=True).require_complete()

    @classmethod
    def of_packages(
        cls, packages: Iterable[str], *, defer_features: bool = False, may_be_empty: Container[str] = ()
    ) -> PatchSet:
        """Returns the patches of some packages, and in `faults` the files that cannot be loaded. A package without
        patches is an error unless `may_be_empty` has it."""
        files = [file for package in packages for file in _files(package, may_be_empty=package in may_be_empty)]
        deferred = [file for file in files if defer_features and file.waits_for]
        patches: list[Patch] = []
        faults = {}
        for file in files:
            if file not in deferred:
                try:
                    patches += file.load()
                except PatchError as fault:
                    faults[file.module] = fault
        found = cls(tuple(patches), tuple(deferred), faults)
        return found if faults else found.checked()  # a patch may refer to one that could not be loaded

    @classmethod
    def announced(cls) -> PatchSet:
        """Returns the patches of all packages that installed distributions announce, as `of_packages` does."""
        return cls.of_packages(announced_packages())

    def require_complete(self) -> PatchSet:
        """Returns the set itself. Raises PatchError if a file could not be loaded."""
        if self.faults:
            raise PatchError("\n".join(map(str, self.faults.values())))
        return self

    def __bool__(self) -> bool:
        return bool(self.patches or self.deferred)

    def checked(self) -> PatchSet:
        """Returns the set itself. Raises PatchError if names are not unique, or if patches of one target have no
        order."""
        names = refuse_duplicate_names(self.patches)
        for patch in self.patches:
            if patch.after is not None:
                other = names.get(patch.after)
                if other is None or other.target != patch.target:
                    raise PatchError(f"{patch.name} has after={patch.after!r}, which is not a patch of the same target")
                _refuse_later(patch, other)
        _refuse_unordered(self.patches)
        return self

    def get(self, name: str) -> Patch:
        """Returns a patch by name. Raises PatchError, with the nearest name, if there is none."""
        for patch in self.patches:
            if patch.name == name:
                return patch
        self.require_complete()
        names = [patch.name for patch in self.patches]
        raise PatchError(
            f"there is no patch {name!r}{nearest(name, names)} The patches are: {', '.join(names) or 'none'}."
        )

    def for_process(self, process: Process) -> tuple[Patch, ...]:
        """Returns the patches of a process, each after the one that its `after` names."""
        return tuple(in_order([patch for patch in self.patches if patch.process is process]))


def announced_packages(group: str = ENTRY_POINT_GROUP) -> list[str]:
    """Returns the packages of patches that installed distributions announce in an entry-point group."""
    return [point.value for point in entry_points(group=group)]


def _files(package: str, *, may_be_empty: bool) -> list[PatchFile]:
    """Returns the patch files of a package. Raises PatchError for a file whose name or folder would leave it unused: a
    package need not have patches for every process, but no patch may be skipped silently."""
    processes = {process.value: process for process in Process}
    files = []
    for name in _submodules(package):
        folder = f"{package}.{name}"
        if name.startswith("patch_"):
            raise PatchError(f"{folder} is not in a process folder; move it into one of {', '.join(processes)}")
        inside = _submodules(folder) if _search_path(folder) else []
        for file in inside:
            if name in processes and not file.startswith("patch_"):
                raise PatchError(f"{folder}.{file} is not called patch_<module>; rename it or move it elsewhere")
            if name not in processes and file.startswith("patch_"):
                raise PatchError(
                    f"{folder}.{file} is not in a process folder; move it into one of {', '.join(processes)}"
                )
        if name in processes:
            modules = [f"{folder}.{file}" for file in inside]
            files += [PatchFile(module, processes[name], waits_for(_source(module))) for module in modules]
    if not files and not may_be_empty:
        raise PatchError(
            f"{package} has no patches: none of its folders {', '.join(processes)} has a file patch_<module>.py"
        )
    return sorted(files, key=lambda file: (list(Process).index(file.process), file.module))


def _submodules(package: str) -> list[str]:
    """Returns the names of the modules and packages in a package, without importing it."""
    path = _search_path(package)
    if path is None:
        raise PatchError(f"there is no package {package!r}; install it, or name one that has patches")
    # Python also imports folders without __init__.py, which pkgutil leaves out.
    bare = {
        child.name
        for folder in map(Path, path)
        if folder.is_dir()
        for child in folder.iterdir()
        if child.is_dir() and child.name.isidentifier() and next(child.glob("*.py"), None) is not None
    }
    return sorted({info.name for info in pkgutil.iter_modules(path)} | bare)


def _search_path(package: str) -> list[str] | None:
    """Returns the folders of a package, or None if the name is not that of a package."""
    try:
        spec = find_spec(package)
    except Exception as fault:  # from importing the packages that contain it
        raise PatchError(f"the package {package!r} cannot be imported: {type(fault).__name__}: {fault}") from fault
    return list(spec.submodule_search_locations or ()) or None if spec is not None else None


def _source(module: str) -> str:
    """Returns the source of a module, or an empty string. Loading the module reports why it cannot be read."""
    spec = find_spec(module)
    loader = spec.loader if spec is not None else None
    try:
        return (loader.get_source(module) if isinstance(loader, InspectLoader) else None) or ""
    except ImportError:  # not text
        return ""


def waits_for(source: str) -> tuple[str, ...]:
    """Returns the modules of vLLM that the patches of a file wait for. It is empty if one of the patches does not wait,
    or if `target` or `on_import` of one is not a literal."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # importing the file reports the error
        return ()
    modules: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called_name(node.func) == "Patch":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            target, waits = (_literal(given.get(name)) for name in ("target", "on_import"))
            if waits is not True or not isinstance(target, str):
                return ()
            modules[target.partition(":")[0]] = None
    return tuple(modules)


def _called_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _literal(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def refuse_duplicate_names(patches: Iterable[Patch]) -> dict[str, Patch]:
    """Returns the patches by name. Raises PatchError if two have the same name."""
    names: dict[str, Patch] = {}
    for patch in patches:
        if patch.name in names:
            raise PatchError(
                f"two patches have the name {patch.name!r}: one in {patch.module}, one in {names[patch.name].module}; "
                "rename one"
            )
        names[patch.name] = patch
    return names


def _refuse_later(patch: Patch, before: Patch) -> None:
    """Raises PatchError if the patch that `after` names would be applied later than `patch`."""
    processes = list(Process)
    if processes.index(before.process) > processes.index(patch.process):
        raise PatchError(
            f"{patch.name} is for {patch.process.value} and has after={before.name!r}, which is for "
            f"{before.process.value} and applied later; reverse the order, or give both the same process"
        )
    if before.on_import and not patch.on_import:
        raise PatchError(
            f"{patch.name} has after={before.name!r}, which waits for its module; set on_import=True on both or on "
            "neither"
        )


def _refuse_unordered(patches: Iterable[Patch]) -> None:
    """Raises PatchError if `after` does not put the patches of one target into one order."""
    by_target: dict[str, list[Patch]] = {}
    for patch in patches:
        by_target.setdefault(patch.target, []).append(patch)
    for target, same in by_target.items():
        first = [patch for patch in same if patch.after is None]
        followed = [patch.after for patch in same if patch.after is not None]
        if len(first) != 1 or len(set(followed)) != len(followed):
            names = ", ".join(patch.name for patch in same)
            raise PatchError(
                f"several patches replace {target} ({names}) without an order: set after=… on all but the first"
            )


def in_order(patches: list[Patch]) -> list[Patch]:
    """Returns the patches, each after the one that its `after` names. Raises PatchError if that is circular."""
    result: list[Patch] = []
    while len(result) < len(patches):
        placed = {patch.name for patch in result}
        waiting = {patch.name for patch in patches} - placed
        ready = [p for p in patches if p.name in waiting and (p.after is None or p.after not in waiting)]
        if not ready:
            raise PatchError(f"the order of patches is circular: {', '.join(sorted(waiting))}; change one 'after'")
        result += ready
    return result
