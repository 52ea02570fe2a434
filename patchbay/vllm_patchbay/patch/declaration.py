"""Defines `Patch`, the declaration of a patch beside its code.

What would otherwise be a comment is a field, and a field that is missing or empty is an error when the module is
imported. A patch cannot be written without its reason, its upstream link and the condition for its removal.
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
    """Names the process that needs a patch. The patch is applied there at the latest."""

    PLATFORM = "platform"
    """Every process, as soon as vLLM chooses the platform."""
    ENGINE = "engine"
    """The process of the engine core."""
    WORKER = "worker"
    """The processes that run the model."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Holds a digest of the target's source, and one of each of its lines.

    The digests of lines locate a drift line by line, without a copy of vLLM's source.
    """

    digest: str
    lines: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Returns the fingerprint that a text of hexadecimal digits contains. Raises PatchError if it is none."""
        if not _FINGERPRINT.match(text):
            raise PatchError(f"{text!r} is not a fingerprint; 'vllm-patchbay show' prints that of a patch's target")
        digest, *lines = text.split()
        return cls(digest, tuple(lines))

    def __str__(self) -> str:
        return " ".join((self.digest, *self.lines))


@dataclass(eq=False)
class Patch:
    """Declares a change of one attribute of one module or class."""

    target: str
    """Attribute to replace, as ``package.module:Qualified.name``."""
    process: Process
    versions: str
    """vLLM versions that the patch is for, as a specifier: ``>=0.32,<0.33``."""
    why: str
    """What is wrong with the target."""
    how: str
    """What the replacement does differently."""
    upstream: str
    """Link to the issue or change upstream; or ``none: `` and the reason that there is none."""
    remove_when: str
    """Condition for the removal of the patch, in words."""
    fingerprints: Mapping[str, str]
    """Fingerprint of the target that the patch was written against, by vLLM version."""
    expires: str | None = None
    """vLLM versions that no longer need the patch, as a specifier. There it is reported as expired and not applied."""
    fixed_if: tuple[str, str] | None = None
    """Function or class of vLLM, written like `target`, and a text that its normalized source has once vLLM is fixed.
    ``vllm-patchbay upgrade`` then reports that the patch may go."""
    faulty_while: tuple[str, str] | None = None
    """The same with a text that the source has as long as vLLM is not fixed."""
    tolerates_change: str | None = None
    """Reason why the patch may be applied to a changed target. Without it, a drift is an error."""
    after: str | None = None
    """Name of the patch of the same target that this one is applied on top of."""
    on_import: bool = False
    """Whether the patch belongs to one model or feature. It is then verified and applied when the target's module is
    imported, and its failure affects only code that imports that module."""
    replacement: Any = field(default=None, init=False)
    is_decorated: bool = field(default=False, init=False)
    """Whether the replacement is a function or class, and not a value."""
    name: str = field(default="", init=False)
    module: str = field(default="", init=False)
    """Module that declares the patch."""
    original: Any = field(default=None, init=False)
    """What the patch replaced, once it has been applied."""
    in_place: bool = field(default=False, init=False)
    """Whether the patch is applied at present."""

    def __post_init__(self) -> None:
        for text in ("target", "versions", "why", "how", "upstream", "remove_when"):
            value = getattr(self, text)
            if not isinstance(value, str) or not value.strip():
                raise PatchError(
                    f"the patch of {self.target or 'no target'!r}: the field {text!r} is empty; fill it in"
                )
        check_target(self.target)
        if not isinstance(self.process, Process):
            raise PatchError(f"{self.target}: process is {self.process!r}; use Process.PLATFORM, ENGINE or WORKER")
        check_link(self.target, self.upstream)
        for specifier in (self.versions, self.expires):
            if specifier is not None:
                if not specifier.strip():
                    raise PatchError(f"{self.target}: expires is empty; leave it out, or write it as '>=0.33'")
                check_versions(self.target, specifier)
        for field_name in ("fixed_if", "faulty_while"):
            _check_condition(self.target, field_name, getattr(self, field_name))
        if not self.fingerprints:
            raise PatchError(f"{self.target}: fingerprints is empty; 'vllm-patchbay new' writes them")
        for version, text in self.fingerprints.items():
            try:
                Version(version)
            except InvalidVersion:
                raise PatchError(
                    f"{self.target}: {version!r} in fingerprints is not a version; write one such as '0.32.0'"
                ) from None
            Fingerprint.parse(text)
        if self.after is not None and not self.after.strip():
            raise PatchError(f"{self.target}: after is empty; leave it out, or name the patch to go after")
        if self.tolerates_change is not None and not self.tolerates_change.strip():
            raise PatchError(
                f"{self.target}: tolerates_change is empty; leave it out, or write why a change is harmless"
            )

    @property
    def target_module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def target_name(self) -> str:
        return self.target.partition(":")[2]

    def known_fingerprints(self) -> dict[str, Fingerprint]:
        """Returns the parsed fingerprints, by vLLM version."""
        return {version: Fingerprint.parse(text) for version, text in self.fingerprints.items()}

    def __call__(self, replacement: Any) -> Patch:
        """Declares, as a decorator, the function or class that replaces the target.

        A class can also be replaced by a function that takes the original and returns a subclass. Declaring such a
        patch imports nothing of vLLM.
        """
        if self.name:
            raise PatchError(f"{self.name} already has its replacement")
        self.replacement = replacement
        self.is_decorated = True
        self.name = replacement.__name__
        self.module = replacement.__module__
        return self

    def value(self, name: str, value: Any, module: str) -> Patch:
        """Declares the value that replaces a module constant."""
        if self.name:
            raise PatchError(f"{self.name} already has its replacement")
        self.replacement, self.name, self.module = value, name, module
        return self


def _is_empty(allowed: SpecifierSet) -> bool:
    """Returns whether no version satisfies a range, because its lower bounds are above its upper ones. It tries the
    versions in the range's text and those right after them: a range that is not empty contains one of these."""
    named = [Version(each.version.removesuffix(".*")) for each in allowed if each.operator != "==="]
    tried = [Version("0.0.1.dev0"), Version("99999"), *named]
    tried += [Version(f"{version.public}.post1") for version in named if version.post is None and version.dev is None]
    tried += [Version(".".join(map(str, (*version.release, 0, 1)))) for version in named]
    return bool(named) and not any(allowed.contains(version, prereleases=True) for version in tried)


def check_target(target: str) -> None:
    """Raises PatchError if `target` does not name an attribute of a module or class."""
    if not _TARGET.match(target):
        raise PatchError(f"{target!r} is not a target; write package.module:Qualified.name")


def check_versions(target: str, specifier: str) -> None:
    """Raises PatchError if `specifier` is not a range of versions, or one that no version satisfies."""
    try:
        allowed = SpecifierSet(specifier)
    except InvalidSpecifier as fault:
        raise PatchError(f"{target}: {fault}; write versions as '>=0.32,<0.33'") from None
    if _is_empty(allowed):
        raise PatchError(f"{target}: no version satisfies {specifier!r}; write versions as '>=0.32,<0.33'")


def _check_condition(target: str, field_name: str, condition: object) -> None:
    """Raises PatchError if a condition is given and is not a function or class of vLLM with a text."""
    if condition is None:
        return
    if not isinstance(condition, tuple) or not all(isinstance(each, str) and each.strip() for each in condition):
        condition = ()
    if len(condition) != 2:
        raise PatchError(
            f"{target}: {field_name} is not a pair of texts; write ('package.module:function', 'text in its source')"
        )
    check_target(condition[0])


def check_link(target: str, upstream: str) -> None:
    """Raises PatchError if `upstream` is neither a link nor the reason that there is none."""
    has_reason = upstream.startswith(_NO_LINK) and upstream.removeprefix(_NO_LINK).strip()
    if not has_reason and not _LINK.match(upstream):
        raise PatchError(f"{target}: upstream is {upstream!r}, neither a link nor '{_NO_LINK} ' and a reason")


def patches_of(namespace: Mapping[str, Any]) -> list[Patch]:
    """Returns the patches in a module's namespace. Raises PatchError for one without a replacement."""
    found = [value for value in namespace.values() if isinstance(value, Patch)]
    for patch in found:
        if not patch.name:
            raise PatchError(f"the patch of {patch.target} has no replacement: decorate a function or class with it")
    return list(dict.fromkeys(found))
