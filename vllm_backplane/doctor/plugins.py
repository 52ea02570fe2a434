"""Checks vLLM's plugins, and the effect of VLLM_PLUGINS and VLLM_TARGET_DEVICE on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

from packaging.utils import canonicalize_name

from vllm_backplane.doctor.findings import Finding, Mark, error, warning
from vllm_backplane.doctor.subprocess_checks import CheckResult
from vllm_backplane.errors import nearest

PLATFORM_GROUP = "vllm.platform_plugins"
GENERAL_GROUP = "vllm.general_plugins"
ENDPOINT_GROUP = "vllm.endpoint_plugins"
GROUPS = (PLATFORM_GROUP, GENERAL_GROUP, "vllm.io_processor_plugins", "vllm.stat_logger_plugins", ENDPOINT_GROUP)
CALLED = (PLATFORM_GROUP, GENERAL_GROUP)
"""Groups whose entry points vLLM calls at the start of every process."""

OUR_DISTRIBUTION = "vllm-backplane"
STAT_LOGGER_DISTRIBUTION = "vllm-backplane-stat-logger"
"""Distribution that exists in processes of Backplane alone (`metrics/entry_point.py`)."""
OUR_NAME = "backplane"
NEEDED_GROUPS = (PLATFORM_GROUP, GENERAL_GROUP)
"""Groups of the plugins without which Backplane does not run. Users choose the others."""

FILTER = "VLLM_PLUGINS"
TARGET = "VLLM_TARGET_DEVICE"

State = Literal["loads", "filtered out", "broken", "not tried"]


@dataclass(frozen=True, slots=True)
class EntryPointInfo:
    """Describes the entry point of a plugin."""

    group: str
    name: str
    target: str
    distribution: str

    @property
    def ours(self) -> bool:
        return self.distribution in (OUR_DISTRIBUTION, STAT_LOGGER_DISTRIBUTION)

    @property
    def needed(self) -> bool:
        return self.ours and self.group in NEEDED_GROUPS

    @property
    def key(self) -> str:
        """Returns the name of the check that imports this plugin."""
        return f"plugin {self.name} of {self.distribution} ({self.group})"

    @property
    def call_key(self) -> str:
        """Returns the name of the check that calls this plugin."""
        return f"call of {self.key}"


@dataclass(frozen=True, slots=True)
class Plugin:
    """Describes a plugin and the result of loading it."""

    group: str
    name: str
    distribution: str
    target: str
    state: State
    activates: bool
    """Whether it is a platform plugin that reports its platform as available."""
    mark: Mark
    note: str


def find() -> list[EntryPointInfo]:
    return [
        EntryPointInfo(
            group, point.name, point.value, canonicalize_name(point.dist.name or "") if point.dist else "unknown"
        )
        for group in GROUPS
        for point in entry_points(group=group)
    ]


def allowed_names(environment: Mapping[str, str]) -> list[str] | None:
    """Splits VLLM_PLUGINS as vLLM does: spaces count, and an empty string is a list of one empty name."""
    return environment[FILTER].split(",") if FILTER in environment else None


def is_allowed(plugin: EntryPointInfo, allowed: list[str] | None) -> bool:
    if allowed is None:
        return plugin.group != ENDPOINT_GROUP  # endpoint plugins are loaded only if VLLM_PLUGINS names them
    return plugin.name in allowed


def describe_filter(environment: Mapping[str, str]) -> str:
    allowed = allowed_names(environment)
    if allowed is None:
        return f"{FILTER} is not set: every plugin is loaded, except endpoint plugins, which it must name"
    if allowed == [""]:
        return f"{FILTER} is empty: no plugin is loaded"
    return f"{FILTER} is {environment[FILTER]!r}: only plugins of these names are loaded"


def check_environment(found: Iterable[EntryPointInfo], environment: Mapping[str, str]) -> list[Finding]:
    """Returns the findings that follow from environment variables and metadata, without importing a plugin."""
    return [*_check_target(environment), *_check_filter(list(found), environment), *_check_ours(list(found))]


def _check_target(environment: Mapping[str, str]) -> list[Finding]:
    target = environment.get(TARGET)
    if target is None:
        return []
    remedy = f"unset {TARGET}; choose a device with BACKPLANE_DEVICE"
    if target.lower() == "cpu":
        return [error(f"{TARGET}={target} makes vLLM ignore every platform plugin, this one included", remedy)]
    return [warning(f"{TARGET}={target} is set; it is meant for building vLLM and not for running it", remedy)]


def _check_filter(found: list[EntryPointInfo], environment: Mapping[str, str]) -> list[Finding]:
    allowed = allowed_names(environment)
    if allowed is None:
        return []
    value = environment[FILTER]
    findings = []
    lost = [plugin for plugin in found if plugin.needed and not is_allowed(plugin, allowed)]
    if lost:
        groups = " and ".join(dict.fromkeys(plugin.group for plugin in lost))
        spaced = OUR_NAME in [name.strip() for name in allowed]
        findings.append(
            error(
                f"{FILTER} is {value!r}, which filters out the plugin {OUR_NAME!r} of {OUR_DISTRIBUTION} ({groups})",
                f"remove the spaces from {FILTER}: vLLM compares names with their spaces"
                if spaced
                else f"unset {FILTER}, or set {FILTER}={','.join([*filter(None, allowed), OUR_NAME])}",
            )
        )
    known = {plugin.name for plugin in found}
    for name in allowed:
        if name and name not in known and name.strip() != OUR_NAME:
            what = f"{FILTER} contains {name!r}, and no installed plugin has that name{nearest(name, known)}"
            findings.append(warning(what.rstrip("."), f"correct the name or remove it from {FILTER}"))
    return findings


def _check_ours(found: list[EntryPointInfo]) -> list[Finding]:
    findings: list[Finding] = []
    present = {plugin.group for plugin in found if plugin.ours}
    missing = [group for group in NEEDED_GROUPS if group not in present]
    if missing:
        findings.append(
            error(
                f"{OUR_DISTRIBUTION} has no entry point in {' and '.join(missing)}, so vLLM cannot find it",
                "it is on the import path without being installed; run 'pip install .' in its folder",
            )
        )
    namesakes = [plugin for plugin in found if plugin.name == OUR_NAME and not plugin.ours]
    return findings + [
        error(
            f"{plugin.distribution} also has a plugin named {OUR_NAME!r} ({plugin.group}); of plugins with one name "
            "vLLM loads only one",
            f"uninstall {plugin.distribution}",
        )
        for plugin in namesakes
    ]


def judge(
    found: Iterable[EntryPointInfo], environment: Mapping[str, str], results: Mapping[str, CheckResult]
) -> tuple[tuple[Plugin, ...], list[Finding]]:
    """Returns each plugin with the result of loading it. `results` are by `key` and `call_key`."""
    allowed = allowed_names(environment)
    plugins, findings = [], []
    for info in found:
        plugin, finding = _judge_one(info, allowed, results)
        plugins.append(plugin)
        findings += finding
    # Unless it was asked for, Backplane does not activate itself beside another platform plugin.
    active = [plugin for plugin in plugins if plugin.activates]
    is_asked_for = any(plugin.distribution == OUR_DISTRIBUTION for plugin in active)
    for rival in [plugin for plugin in active if plugin.distribution != OUR_DISTRIBUTION and is_asked_for]:
        findings.append(
            error(
                f"{rival.distribution} has the platform plugin {rival.name!r}, which would be active together with "
                f"{OUR_NAME!r}; vLLM refuses two",
                f"uninstall {rival.distribution}, or set {FILTER} to the names of all plugins except {rival.name!r}",
            )
        )
    return tuple(plugins), findings


def _judge_one(
    info: EntryPointInfo, allowed: list[str] | None, results: Mapping[str, CheckResult]
) -> tuple[Plugin, list[Finding]]:
    imported, called = results.get(info.key), results.get(info.call_key)

    def plugin(state: State, mark: Mark, note: str = "") -> Plugin:
        activates = info.group == PLATFORM_GROUP and called is not None and bool(called.value)
        return Plugin(info.group, info.name, info.distribution, info.target, state, activates, mark, note)

    if not is_allowed(info, allowed):
        by = "not named" if info.group == ENDPOINT_GROUP else ""
        if info.ours and by and allowed is None:
            by = "not named; serve adds it"
        return plugin("filtered out", "error" if info.needed else "-", by), []
    if imported is None:
        return plugin("not tried", "-"), []
    failed = imported if imported.fault is not None or called is None else called
    if failed.fault is None:
        return plugin("loads", "ok"), []
    how = "cannot be imported" if failed is imported else "fails when called"
    what = f"plugin {info.name!r} of {info.distribution} ({info.group}) {how}: {failed.fault}"
    if info.ours:
        remedy = f"install a supported vLLM, or reinstall {info.distribution}"
        return plugin("broken", "error", how), [error(what, remedy)]
    # vLLM logs a plugin that it cannot import, or a platform plugin that raises, and goes on without it. A general
    # plugin that raises ends every process that calls it.
    fatal = failed.fatal or (info.group == GENERAL_GROUP and failed is called)
    finding = (error if fatal else warning)(
        what, f"repair, update or uninstall {info.distribution}, or set {FILTER} to the names of the other plugins"
    )
    return plugin("broken", finding.severity, how), [finding]
