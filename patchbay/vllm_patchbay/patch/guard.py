"""Guards code of a plugin that depends on private source of vLLM: overrides, fast paths, reimplementations.

A guard names the functions of vLLM that the code was written against, the reason, and what happens if their source is
another one. Fingerprints of the source, one per release, are in one file of the plugin, which `vllm-patchbay record`
writes. Where a patch replaces something, a guard changes nothing: it is checked by ``vllm-patchbay check``, and at
start-up. A guard of code that only some processes use has a feature, and is verified when the feature is first used.

A whole file is compared first, by its digest. Functions are parsed and compared only in files that no recorded release
has, so that a start on a known release takes little time.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, wraps
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import Version

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch.declaration import Fingerprint, check_target, check_versions
from vllm_patchbay.patch.mentions import statements_with
from vllm_patchbay.patch.verification import (
    Outcome,
    Verdict,
    diff_by_digests,
    diff_by_text,
    similarity,
    take_fingerprint,
)
from vllm_patchbay.upstream import Resolution, SymbolIndex, cached_tree, in_range, installed_tree, installed_version

logger = logging.getLogger("vllm.vllm_patchbay.guard")  # vLLM configures handlers for its own logger tree only

DECORATOR = "guarded"
"""Name under which a plugin must use `Guards.guarded`, so that guards are found in its source."""
_ABSENT = "absent"
_FILE_DIGITS = 32

ENTRY_POINT_GROUP = "vllm_patchbay.guards"
"""Entry-point group in which a distribution announces its package, whose source has guards."""
RECORD_FILE = "fingerprints.json"
"""Name of the file with fingerprints in the folder of a package."""

Guarded = TypeVar("Guarded")


class OnDrift(Enum):
    """Names what happens if vLLM's source is not the one that the code was written against."""

    STOP = "stops the start"
    FALL_BACK = "vLLM's own code runs"


@dataclass(frozen=True, slots=True)
class Guard:
    """Declares that some code depends on the source of one function or class of vLLM."""

    target: str
    """Function or class of vLLM, as ``package.module:Qualified.name``."""
    why: str
    """What the code does instead of, or assumes of, the target."""
    place: str
    """Module of the plugin that has the code."""
    fast_path: str = ""
    """Name of the fast path that is switched off on a drift. Without one, a drift stops the start."""
    versions: str = ""
    """vLLM versions that the code is for, as a specifier; empty for all. With others, a fast path is switched off."""
    feature: str = ""
    """Feature of the plugin that uses the code. The guard is verified at the feature's first use, or at every start if
    there is none."""
    mentions: tuple[str, ...] = ()
    """Names whose statements in the target the code depends on. The rest of the target may change. It is for long
    functions; without names, the whole target is compared."""

    def __post_init__(self) -> None:
        check_target(self.target)
        if not self.why.strip():
            raise PatchError(f"the guard of {self.target}: why is empty; fill it in")
        if not isinstance(self.mentions, tuple) or not all(isinstance(one, str) and one for one in self.mentions):
            raise PatchError(f"the guard of {self.target}: mentions is {self.mentions!r}; make it a tuple of names")
        if self.versions:
            check_versions(self.target, self.versions)

    @property
    def key(self) -> str:
        """Returns the name under which the record has the fingerprints."""
        return f"{self.target} [{', '.join(self.mentions)}]" if self.mentions else self.target

    @property
    def on_drift(self) -> OnDrift:
        return OnDrift.FALL_BACK if self.fast_path else OnDrift.STOP

    @property
    def reaction(self) -> str:
        """Returns what happens on a drift, in words."""
        if self.fast_path:
            return f"fast path '{self.fast_path}' is switched off, {self.on_drift.value}"
        return f"stops the first use of: {self.feature}" if self.feature else self.on_drift.value

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        return self.target.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Record:
    """Holds the recorded source of vLLM's releases."""

    targets: Mapping[str, Mapping[str, tuple[str, ...]]]
    """By the key of a guard: the releases of each fingerprint, and under `absent` those without the target."""
    files: Mapping[str, Mapping[str, tuple[str, ...]]]
    """By module: the releases of each digest of the file."""

    @classmethod
    def read(cls, path: Path) -> Record:
        if not path.exists():
            return cls({}, {})
        content = json.loads(path.read_text())
        targets, files = (
            {key: {text: tuple(releases) for text, releases in by.items()} for key, by in content[part].items()}
            for part in ("targets", "files")
        )
        return cls(targets, files)

    def releases(self) -> list[str]:
        """Returns all recorded releases, the oldest first."""
        found = {release for by in self.targets.values() for releases in by.values() for release in releases}
        return sorted(found, key=Version)

    def write(self, path: Path) -> None:
        content = {
            part: {key: dict(by) for key, by in sorted(getattr(self, part).items())} for part in ("targets", "files")
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def _digest_of(index: SymbolIndex, module: str) -> str:
    """Returns the digest of a module's file, which is computed once, or an empty string if it cannot be read."""
    tree = index.tree_of(module)
    if tree is None:
        return ""
    known: dict[str, str] = tree.derived.setdefault("file digests", {})
    if module not in known:
        source = tree.read(module)
        known[module] = "" if source is None else file_digest(source)
    return known[module]


def file_digest(source: str) -> str:
    """Returns a digest of a module's source."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:_FILE_DIGITS]


@dataclass
class Guards:
    """Holds the guards of a plugin that were declared in this process, and which fast paths are switched off."""

    record_file: Path
    """File with the fingerprints."""
    setting: str
    """How a user goes on in spite of a drift, for the error's text."""
    drift: str = "error"
    """'error' if a drift raises, or 'warn' if it is only logged."""
    declared: list[Guard] = field(default_factory=list)
    switched_off: dict[str, str] = field(default_factory=dict)
    """Maps fast paths to the reason why they are switched off."""
    _waiting: dict[str, list[Guard]] = field(default_factory=dict)
    """Maps features to their guards that have not been verified, and "" to those without a feature."""
    _used: set[str] = field(default_factory=lambda: {""})
    """Features that this process uses."""
    _verified_paths: set[str] = field(default_factory=set)
    _record: Record | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def guarded(
        self,
        *targets: str,
        why: str,
        fast_path: str = "",
        versions: str = "",
        feature: str = "",
        mentions: tuple[str, ...] = (),
    ) -> Callable[[Guarded], Guarded]:
        """Declares, as a decorator, what a function or class depends on, and returns the function or class.

        The arguments must be literals, because `declared_in` reads them from the source. A class with a feature uses
        the feature when its first object is constructed. Functions with one need a call of `use`.
        """

        def declare(code: Guarded) -> Guarded:
            place = getattr(code, "__module__", "")
            for target in targets:
                guard = Guard(target, why, place, fast_path, versions, feature, mentions)
                with self._lock:
                    self.declared.append(guard)
                    self._waiting.setdefault(feature, []).append(guard)
            if feature and isinstance(code, type):
                self._use_when_constructed(code, feature)
            return code

        return declare

    def _use_when_constructed(self, code: Any, feature: str) -> None:
        own = vars(code).get("__init__")

        def construct(instance: Any, *args: Any, **kwargs: Any) -> None:
            self.use(feature)
            if own is not None:
                own(instance, *args, **kwargs)
            else:
                super(code, instance).__init__(*args, **kwargs)

        code.__init__ = wraps(code.__init__)(construct)

    def verify_installed(self) -> None:
        """Verifies the guards that were declared since the last call against the vLLM of this environment: those
        without a feature, and those of features that are in use. Raises PatchError on a drift, unless `drift` is 'warn'
        or the guard is that of a fast path."""
        for feature in sorted(self._used):
            self.use(feature)

    def use(self, feature: str) -> None:
        """Verifies the guards of a feature at its first use, as `verify_installed` does. Guards of the feature that are
        declared later, by modules that are not imported yet, are verified by the next `verify_installed`."""
        self._used.add(feature)
        if self._waiting.get(feature):
            self.verify(_installed_index, str(installed_version()), feature)

    def verify(self, index: Callable[[], SymbolIndex], version: str, feature: str = "") -> None:
        """Verifies the guards of a feature that were declared since the last call.

        Fast paths whose targets changed are switched off with a warning. Any other change raises PatchError with a
        diff, or is logged if `drift` is 'warn'.
        """
        with self._lock:
            if self._waiting.get(feature):
                self._verify(self._waiting[feature], index, version)
                del self._waiting[feature]

    def _verify(self, waiting: list[Guard], index: Callable[[], SymbolIndex], version: str) -> None:
        if self._record is None:
            self._record = Record.read(self.record_file)
        record, faults = self._record, []
        for guard in waiting:
            verdict = verify_guard(guard, record, index(), version)
            if guard.fast_path and verdict.outcome is Outcome.NOT_NEEDED:
                self.switched_off.setdefault(guard.fast_path, verdict.detail)
            if not verdict.outcome.fails_check:
                continue
            if guard.fast_path:
                if guard.fast_path not in self.switched_off:
                    logger.warning(
                        "Fast path %r is switched off, and vLLM's own code runs: %s. 'patches check' shows the diff.",
                        guard.fast_path,
                        verdict.detail,
                    )
                self.switched_off.setdefault(guard.fast_path, verdict.detail)
            elif self.drift == "warn":
                logger.warning("%s", verdict.detail)
            else:
                faults.append(f"{verdict.detail}\n{verdict.diff}")
        if faults:
            raise PatchError(
                "\n".join(faults) + f"\nInstall a vLLM that this version of the plugin was written against "
                f"({', '.join(record.releases())}), or set {self.setting} to go on unchanged."
            )
        self._verified_paths |= {guard.fast_path for guard in waiting}

    def is_switched_off(self, fast_path: str) -> bool:
        """Returns whether a fast path is switched off. Raises PatchError if none of this name has been verified."""
        if fast_path not in self._verified_paths:
            raise PatchError(
                f"no guard of a fast path {fast_path!r} has been verified; declare it, and verify it first"
            )
        return fast_path in self.switched_off


@cache
def _installed_index() -> SymbolIndex:
    return SymbolIndex(installed_tree())


def verify_guard(guard: Guard, record: Record, index: SymbolIndex, version: str) -> Verdict:
    """Returns whether a target is what was recorded for some release."""
    if guard.versions and not in_range(version, guard.versions):
        return Verdict(
            guard.target, Outcome.NOT_NEEDED, f"the code is for vLLM {guard.versions}, and this is {version}"
        )
    known = record.targets.get(guard.key, {})
    same_file = record.files.get(guard.module, {}).get(_digest_of(index, guard.module), ())
    for fingerprint, releases in known.items():
        common = [release for release in same_file if release in releases]
        if common and fingerprint != _ABSENT:
            return Verdict(guard.target, Outcome.FITS, f"the file is the same as in vLLM {common[-1]}", "", fingerprint)
    found = index.resolve(guard.module, guard.name)
    if not found.is_found or found.path != guard.target:
        if any(Version(release).release[:2] == Version(version).release[:2] for release in known.get(_ABSENT, ())):
            return Verdict(guard.target, Outcome.NOT_NEEDED, f"vLLM {version} has no such function")
        reason = found.reason if not found.is_found else f"it is now {found.path}"
        return Verdict(
            guard.target, Outcome.MISSING,
            f"{guard.target}, on which {guard.place} depends, does not exist in vLLM {version} ({reason})",
        )  # fmt: skip
    text = _source_of(guard, index, found)
    now = take_fingerprint(text)
    by_digest = {Fingerprint.parse(each).digest: (each, of) for each, of in known.items() if each != _ABSENT}
    if now.digest in by_digest:
        release = by_digest[now.digest][1][-1]
        return Verdict(guard.target, Outcome.FITS, f"the same as in vLLM {release}", "", str(now))
    part = f" with {', '.join(guard.mentions)}" if guard.mentions else ""
    detail = f"{guard.target}{part}, on which {guard.place} depends ({guard.why}), has another source in vLLM {version}"
    if not by_digest:
        return Verdict(guard.target, Outcome.DRIFTED, f"{detail}: no fingerprint is recorded", "", str(now))
    nearest, releases = max(by_digest.values(), key=lambda each: similarity(Fingerprint.parse(each[0]), now))
    before = _cached(guard, releases, Fingerprint.parse(nearest))
    diff = diff_by_digests(text, Fingerprint.parse(nearest), now) if before is None else diff_by_text(before, text)
    return Verdict(guard.target, Outcome.DRIFTED, f"{detail}: it differs from vLLM {releases[-1]}", diff, str(now))


def _source_of(guard: Guard, index: SymbolIndex, found: Resolution) -> str:
    """Returns the normalized source that a guard compares."""
    source = index.normalized_source_of(found.module, found.qualname)
    return statements_with(guard.mentions, source) if guard.mentions else source


def _cached(guard: Guard, releases: Iterable[str], known: Fingerprint) -> str | None:
    """Returns the target's source in a recorded release, or None if the cache has none of them."""
    for release in releases:
        tree = cached_tree(release)
        index = SymbolIndex(tree) if tree is not None else None
        if index is not None and (found := index.resolve(guard.module, guard.name)).is_found:
            source = _source_of(guard, index, found)
            if take_fingerprint(source).digest == known.digest:
                return source
    return None


@dataclass(frozen=True, slots=True)
class GuardedPackage:
    """Locates a package whose source has guards, without importing it."""

    name: str
    folder: Path

    @classmethod
    def find(cls, name: str) -> GuardedPackage:
        """Returns the package. Raises PatchError if it is not installed as a folder."""
        try:
            spec = find_spec(name)
        except Exception as fault:  # from importing the packages that contain it
            raise PatchError(f"the package {name!r} cannot be imported: {type(fault).__name__}: {fault}") from fault
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            raise PatchError(f"there is no package {name!r}; install it, or name one that has guards")
        return cls(name, Path(places[0]))

    @classmethod
    def announced(cls) -> list[GuardedPackage]:
        """Returns the packages that installed distributions announce."""
        return [cls.find(point.value) for point in entry_points(group=ENTRY_POINT_GROUP)]

    @property
    def record_file(self) -> Path:
        return self.folder / RECORD_FILE

    def guards(self) -> list[Guard]:
        """Returns the guards in the source of the package."""
        return declared_in(self.name, self.folder)

    def verify(self, index: SymbolIndex, version: str) -> list[tuple[Guard, Verdict]]:
        """Returns the verdict on every guard of the package."""
        record = Record.read(self.record_file)
        return [(guard, verify_guard(guard, record, index, version)) for guard in self.guards()]


def declared_in(package: str, folder: Path) -> list[Guard]:
    """Returns the guards in the source of a package, which is not imported. Raises PatchError for one whose arguments
    are not literals."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if f"{DECORATOR}(" in source:
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            found += list(_guards_of(ast.parse(source), ".".join(parts).removesuffix(".__init__"), file))
    return found


def _guards_of(tree: ast.AST, place: str, file: Path) -> Iterator[Guard]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _called(node.func) != DECORATOR:
            continue
        try:
            targets = [ast.literal_eval(each) for each in node.args]
            given: dict[str, Any] = {each.arg or "": ast.literal_eval(each.value) for each in node.keywords}
        except ValueError:
            raise PatchError(
                f"{file}:{node.lineno}: the arguments of {DECORATOR} are not literals, so that they cannot be read "
                "without importing the module; write the texts out"
            ) from None
        for target in targets:
            fast_path, versions, feature = (given.get(key, "") for key in ("fast_path", "versions", "feature"))
            yield Guard(target, given.get("why", ""), place, fast_path, versions, feature, given.get("mentions", ()))


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def recorded(guards: Iterable[Guard], record: Record, index: SymbolIndex, version: str) -> Record:
    """Returns the record with the source of one release added. Targets that no guard names are left out."""
    targets: dict[str, dict[str, tuple[str, ...]]] = {}
    files: dict[str, dict[str, tuple[str, ...]]] = {}
    for guard in guards:
        targets.setdefault(guard.key, _without(record.targets.get(guard.key, {}), version))
        files.setdefault(guard.module, _without(record.files.get(guard.module, {}), version))
        if guard.versions and not in_range(version, guard.versions):
            continue
        found = index.resolve(guard.module, guard.name)
        is_there = found.is_found and found.path == guard.target
        fingerprint = str(take_fingerprint(_source_of(guard, index, found))) if is_there else _ABSENT
        targets[guard.key] = _added(targets[guard.key], fingerprint, version)
        tree = index.tree_of(guard.module)
        source = tree.read(guard.module) if tree is not None else None
        if source is not None:
            files[guard.module] = _added(files[guard.module], file_digest(source), version)
    return Record(targets, files)


def _added(known: Mapping[str, tuple[str, ...]], key: str, version: str) -> dict[str, tuple[str, ...]]:
    """Returns `known` with a release under one key only."""
    result = _without(known, version)
    return {**result, key: tuple(sorted({*result.get(key, ()), version}, key=Version))}


def _without(known: Mapping[str, tuple[str, ...]], version: str) -> dict[str, tuple[str, ...]]:
    """Returns `known` without a release."""
    kept = {each: tuple(v for v in versions if v != version) for each, versions in known.items()}
    return {each: versions for each, versions in kept.items() if versions}
