"""A patch is a declaration beside its code.

Everything that a comment block would say is a field, and a field that is missing or empty is an error when the module
is imported: a patch cannot be written without its reason, its link and its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_patchbay.errors import PatchError

_TARGET = re.compile(r"^[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*$")
_FINGERPRINT = re.compile(r"^[0-9a-f]{16}( [0-9a-f]{4})*$")
_LINK = re.compile(r"^https?://[\w-]+(\.[\w-]+)+(:\d+)?(/\S*)?$")
_NO_LINK = "none:"


class Process(Enum):
    """Where a patch is needed; it is applied there at the latest."""

    PLATFORM = "platform"
    """The API or main process, and every other, as soon as the platform is chosen."""
    ENGINE = "engine"
    """The engine core's process."""
    WORKER = "worker"
    """The processes that run the model."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the target's source was: a digest of the whole, and one of each line.

    Lines are kept as digests so that a drift can be shown line by line without a copy of vLLM's source.
    """

    digest: str
    lines: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        if not _FINGERPRINT.match(text):
            raise PatchError(f"{text!r} is not a fingerprint; 'vllm-patchbay new' writes one")
        digest, *lines = text.split()
        return cls(digest, tuple(lines))

    def __str__(self) -> str:
        return " ".join((self.digest, *self.lines))


@dataclass(eq=False)
class Patch:
    """A change to one attribute of one module or class. `original` is what it replaced, once applied."""

    target: str
    """package.module:Qualified.name"""
    process: Process
    versions: str
    """vLLM versions it is for, as a specifier: ``>=0.32,<0.33``."""
    why: str
    how: str
    upstream: str
    """Link to the issue or change upstream; or ``none: `` and the reason that there is none."""
    remove_when: str
    """The condition under which the patch goes away, in words."""
    fingerprints: Mapping[str, str]
    """Source of the target that this was written against, by vLLM version."""
    expires: str | None = None
    """vLLM versions that need it no more, as a specifier; there it is reported as expired and not applied."""
    tolerates_change: str | None = None
    """Why a changed target is no reason to stop; leave it out and a drift is an error."""
    after: str | None = None
    """Name of another patch on the same target that this one goes on top of."""
    on_import: bool = False
    """Apply when the target's module is imported: for a patch of one model or feature, which then costs the others
    nothing and cannot stop them."""
    replacement: Any = field(default=None, init=False)
    is_decorated: bool = field(default=False, init=False)
    """The replacement is a function or class, and not a value."""
    name: str = field(default="", init=False)
    module: str = field(default="", init=False)
    original: Any = field(default=None, init=False)
    in_place: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for text in ("target", "versions", "why", "how", "upstream", "remove_when"):
            value = getattr(self, text)
            if not isinstance(value, str) or not value.strip():
                raise PatchError(f"the patch of {self.target or 'nothing'!r} does not say {text!r}")
        if not _TARGET.match(self.target):
            raise PatchError(f"{self.target!r} is not a target; write package.module:Qualified.name")
        if not isinstance(self.process, Process):
            raise PatchError(f"{self.target}: process is {self.process!r}; use Process.PLATFORM, ENGINE or WORKER")
        check_link(self.target, self.upstream)
        for specifier in (self.versions, self.expires):
            if specifier is not None:
                if not specifier.strip():
                    raise PatchError(f"{self.target}: expires is empty; leave it out, or write it as '>=0.33'")
                try:
                    wanted = SpecifierSet(specifier)
                except InvalidSpecifier as fault:
                    raise PatchError(f"{self.target}: {fault}; write versions as '>=0.32,<0.33'") from None
                if _is_empty(wanted):
                    raise PatchError(f"{self.target}: no version is {specifier!r}; write versions as '>=0.32,<0.33'")
        if not self.fingerprints:
            raise PatchError(f"{self.target}: no fingerprints; 'vllm-patchbay new' writes them")
        for version, text in self.fingerprints.items():
            try:
                Version(version)
            except InvalidVersion:
                raise PatchError(f"{self.target}: {version!r} is not the version that a fingerprint is of") from None
            Fingerprint.parse(text)
        if self.after is not None and not self.after.strip():
            raise PatchError(f"{self.target}: after is empty; leave it out, or name the patch that goes before")
        if self.tolerates_change is not None and not self.tolerates_change.strip():
            raise PatchError(f"{self.target}: tolerates_change is empty; say why a changed target is harmless")

    @property
    def target_module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def target_name(self) -> str:
        return self.target.partition(":")[2]

    def known(self) -> dict[str, Fingerprint]:
        return {version: Fingerprint.parse(text) for version, text in self.fingerprints.items()}

    def __call__(self, replacement: Any) -> Patch:
        """As a decorator: the function or class that takes the target's place. For a class it may be a function that
        takes the original and returns a subclass; then declaring the patch imports nothing of vLLM."""
        if self.name:
            raise PatchError(f"{self.name} already has its replacement")
        self.replacement = replacement
        self.is_decorated = True
        self.name = replacement.__name__
        self.module = replacement.__module__
        return self

    def value(self, name: str, value: Any, module: str) -> Patch:
        """For a module constant: the value that takes its place."""
        if self.name:
            raise PatchError(f"{self.name} already has its replacement")
        self.replacement, self.name, self.module = value, name, module
        return self


def _is_empty(wanted: SpecifierSet) -> bool:
    """Whether the lower bounds of a range lie beyond its upper ones. Tried are the versions it names, and what comes
    right after them: if a range has any, it has one of these."""
    named = [Version(each.version.removesuffix(".*")) for each in wanted if each.operator != "==="]
    tried = [Version("0.0.1.dev0"), Version("99999"), *named]
    tried += [Version(f"{version.public}.post1") for version in named if version.post is None and version.dev is None]
    tried += [Version(".".join(map(str, (*version.release, 0, 1)))) for version in named]
    return bool(named) and not any(wanted.contains(version, prereleases=True) for version in tried)


def check_link(target: str, upstream: str) -> None:
    says_why = upstream.startswith(_NO_LINK) and upstream.removeprefix(_NO_LINK).strip()
    if not says_why and not _LINK.match(upstream):
        raise PatchError(f"{target}: upstream is neither a link nor '{_NO_LINK} ' and a reason")


def patches_of(namespace: Mapping[str, Any]) -> list[Patch]:
    """The patches that a module declares; one without a replacement is an error."""
    found = [value for value in namespace.values() if isinstance(value, Patch)]
    for patch in found:
        if not patch.name:
            raise PatchError(f"the patch of {patch.target} has no replacement: decorate one with it")
    return list(dict.fromkeys(found))
