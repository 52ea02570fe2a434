"""Checks the versions of Python, torch and vLLM from their metadata, without importing them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distributions,
    requires,
)
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_backplane.doctor.findings import Finding, Mark, error, warning
from vllm_backplane.doctor.plugins import OUR_DISTRIBUTION
from vllm_backplane.settings.releases import NEWEST, PREBUILT, RELEASES, release_of_series

MINIMUM_PYTHON = (3, 11)

_INSTALL_VLLM = (
    f"install vLLM {NEWEST.version}: 'make setup' in the repository builds it without kernels; or 'pip install "
    f"{PREBUILT}', which is prebuilt"
)


@dataclass(frozen=True, slots=True)
class Component:
    """Describes a part of the software and its installed version."""

    name: str
    version: str
    """Empty if it is not installed or its version is unknown."""
    distribution: str
    mark: Mark
    note: str = ""


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> tuple[Component, list[Finding]]:
    text, needed = ".".join(map(str, version)), ".".join(map(str, MINIMUM_PYTHON))
    fits = version[:2] >= MINIMUM_PYTHON
    component = Component("python", text, platform.python_implementation(), "ok" if fits else "error")
    if fits:
        return component, []
    return component, [error(f"Python {text} is too old", f"use Python {needed} or later")]


def check_torch(versions: Iterable[str] | None = None) -> tuple[Component, list[Finding]]:
    """Checks the installed torch. `versions` are those of all its installed distributions, the imported one first."""
    found = list(_versions("torch") if versions is None else versions)
    if not found:
        remedy = f"install torch {NEWEST.torch} for this machine; vLLM depends on it"
        finding = error("PyTorch is not installed", remedy)
        return Component("torch", "", "", "error", "not installed"), [finding]
    version = found[0]
    verified = sorted({release.torch for release in RELEASES})
    if _series(version) in {_series(each) for each in verified}:
        return Component("torch", version, "torch", "ok"), []
    finding = warning(
        f"this vllm-backplane was not tested with torch {version} (tested: {', '.join(verified)})",
        f"install torch {NEWEST.torch}, or make sure that the kernels were built with the installed torch",
    )
    return Component("torch", version, "torch", "warning", "not tested"), [finding]


def check_vllm(offered: Iterable[tuple[str, str]] | None = None) -> tuple[Component, list[Finding]]:
    """Checks the installed vLLM. `offered` has (distribution, version) of all its providers, the imported one first."""
    found = list(_vllm_distributions() if offered is None else offered)
    if not found:
        if offered is None and find_spec("vllm") is not None:
            finding = warning(
                "vllm can be imported, but no installed distribution provides it: it is a folder on the import path",
                "install vLLM with pip, so that its version and plugins are found",
            )
            return Component("vllm", "", "", "warning", "not an installed distribution"), [finding]
        return Component("vllm", "", "", "error", "not installed"), [error("vLLM is not installed", _INSTALL_VLLM)]
    findings: list[Finding] = []
    name, version = found[0]
    if len(found) > 1:
        listed = ", ".join(f"{each} {its}" for each, its in found)
        findings.append(
            error(
                f"several distributions provide the package vllm: {listed}; their files overwrite or hide each other",
                f"uninstall all of them (pip uninstall {' '.join(dict.fromkeys(each for each, _ in found))}) and "
                "install one",
            )
        )
    findings += judge_vllm_version(version)
    mark: Mark = max((f.severity for f in findings), key=("warning", "error").index, default="ok")
    return Component("vllm", version, name, mark, coverage(version)), findings


def coverage(version: str) -> str:
    """Returns a note on the tests that run on a vLLM release; empty for every test and for unsupported releases."""
    release = release_of_series(_series(version))
    if release is None:
        return ""
    if release is NEWEST:
        return "" if _public(version) == release.version else f"the tests run on {release.version}"
    return f"{release.coverage} run on {release.version}; every test runs on {NEWEST.version}"


def judge_vllm_version(version: str) -> list[Finding]:
    if release_of_series(_series(version)) is not None:
        return []
    served = ", ".join(".".join(map(str, release.series)) for release in RELEASES)
    return [error(f"vLLM {version} is not supported; supported: {served}", _INSTALL_VLLM)]


def check_requirements(declared: Iterable[str] | None = None) -> list[Finding]:
    """Checks the dependencies of vllm-backplane, which 'pip install --no-deps' leaves out."""
    found = _own_requirements() if declared is None else declared
    needed = [requirement for text in found if _applies(requirement := Requirement(text))]
    missing = [str(each.name) for each in needed if not _versions(canonicalize_name(each.name))]
    if not missing:
        return []
    what = f"vllm-backplane needs {', '.join(missing)}, which is not installed"
    return [error(what, f"pip install {' '.join(missing)}")]


def check_requirements_of_vllm(distribution: str, declared: Iterable[str] | None = None) -> list[Finding]:
    """Checks the versions that the metadata of the installed vLLM asks for. A set-up may have left out some of them."""
    try:
        found = (requires(distribution) or []) if declared is None else declared
    except (PackageNotFoundError, ValueError):  # no distribution, which `check_vllm` reports
        return []
    unmet = [
        f"{requirement.name}{requirement.specifier} (installed: {versions[0] if versions else 'none'})"
        for requirement in (Requirement(text) for text in found)
        if _applies(requirement)
        for versions in [_versions(canonicalize_name(requirement.name))]
        if not versions or not requirement.specifier.contains(versions[0], prereleases=True)
    ]
    if not unmet:
        return []
    what = f"{distribution} asks for other versions than the installed ones: {', '.join(unmet)}"
    return [warning(what, "install them if your package index has them; otherwise go on, and suspect them first")]


def _own_requirements() -> list[str]:
    try:
        return requires(OUR_DISTRIBUTION) or []
    except PackageNotFoundError:  # `plugins.check_environment` reports that the plugin is not installed
        return []


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def check_import(component: Component, imported: str) -> list[Finding]:
    """Checks that the imported vLLM is the one that the metadata describes."""
    if not component.version:
        return judge_vllm_version(imported)
    if _public(component.version) == _public(imported):
        return []
    return [
        warning(
            f"the distribution {component.distribution} is {component.version}, but the imported vllm has version "
            f"{imported}: two installations are mixed, or a folder on the import path hides one",
            "remove the unwanted one from the environment or from PYTHONPATH",
        )
    ]


def _versions(name: str) -> list[str]:
    return [version for _, version in _named(distributions(name=name))]


def _vllm_distributions() -> list[tuple[str, str]]:
    return _named(each for each in distributions() if _provides(each, "vllm"))


def _provides(distribution: Distribution, package: str) -> bool:
    declared = (distribution.read_text("top_level.txt") or "").split()
    return package in declared if declared else f"\n{package}/__init__.py," in f"\n{distribution.read_text('RECORD')}"


def _named(found: Iterable[Distribution]) -> list[tuple[str, str]]:
    """Returns (name, version) in the order of the import path; a folder that is there twice counts once."""
    places = {(_name(each), os.path.realpath(str(each.locate_file("")))): each.version for each in found}
    return [(name, version) for (name, _), version in places.items()]


def _name(distribution: Distribution) -> str:
    return canonicalize_name(distribution.metadata["Name"] or "")


def _series(version: str) -> tuple[int, ...]:
    """Returns (major, minor). A local or development build counts as the release that it precedes."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()


def _public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return version
