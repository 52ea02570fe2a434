"""Checks which platform vLLM selects, whether its plugins load and whether every layer binds.

A subprocess does what a process of vLLM does at its start. Unless the full examination is requested, it stops where the
large imports begin: layers are then looked up in vLLM's source, and Backplane's own plugin is imported but not called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import Any

from vllm_backplane.doctor import plugins
from vllm_backplane.doctor.findings import Finding, Mark, error, warning
from vllm_backplane.doctor.plugins import EntryPointInfo
from vllm_backplane.doctor.subprocess_checks import CheckResult, CheckRunner
from vllm_backplane.errors import BackplaneError
from vllm_backplane.platform_choice import HOW_TO_CHOOSE
from vllm_backplane.settings.releases import INSTALL_SUPPORTED
from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream import SymbolIndex, installed_tree

CHECKS = f"{__name__}:examine"
"""The function that the subprocess runs."""

VLLM = "import of vllm"
PLATFORM = "vLLM's platform"
WORKER = "import of the worker"
RUNNER = "the model runner"
_BINDING = "layer "
_HOOK = "hook "


@dataclass(frozen=True, slots=True)
class BindingInfo:
    """Describes a layer or another extension point of vLLM, and Backplane's replacement for it."""

    kind: str
    upstream: str
    replacement: str
    operators: tuple[str, ...]
    mark: Mark
    fault: str


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """Describes the platform that vLLM would use."""

    name: str
    """Name of its class; empty if vLLM finds no platform."""
    mark: Mark
    reason: str = ""
    """Why Backplane is this platform, or why it yields to it."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Holds the results of all checks of this module except those of plugins."""

    imported_version: str
    platform: PlatformInfo
    bindings: tuple[BindingInfo, ...]
    findings: tuple[Finding, ...]


def request(found: Iterable[EntryPointInfo], environment: Mapping[str, str], full: bool) -> dict[str, Any]:
    """Returns the request for the subprocess: the plugins that vLLM would load, and how much to check."""
    allowed = plugins.allowed_names(environment)
    return {"plugins": [asdict(info) for info in found if plugins.is_allowed(info, allowed)], "full": full}


# --- in the child -----------------------------------------------------------------------------------------------------


def examine(checks: CheckRunner, request: Mapping[str, Any]) -> None:
    """Runs all checks in vLLM's order: platform plugins, the platform, general plugins, then everything else."""
    infos = [EntryPointInfo(**info) for info in request["plugins"]]
    full = request["full"]
    if checks.attempt(VLLM, _import_vllm if full else _import_vllm_without_compiler) is None:
        return
    loaded = {info: _load(checks, info) for info in infos if info.group == plugins.PLATFORM_GROUP}
    for info, function in loaded.items():
        if function is not None:
            checks.attempt(info.call_key, function)
    platform = checks.attempt(PLATFORM, _platform)
    ours = platform is not None and platform["ours"]
    for info in infos:
        if info.group == plugins.GENERAL_GROUP:
            function = _load(checks, info)
            if function is not None and ((ours and full) or not info.ours):
                checks.attempt(info.call_key, function, lambda _result: None)
    if ours and full:
        _check_bindings(checks)
        checks.attempt(WORKER, _import_worker)
    if ours:
        checks.attempt(RUNNER, _check_runner)
    for info in infos:
        if info.group not in plugins.CALLED:
            _load(checks, info)


def _load(checks: CheckRunner, info: EntryPointInfo) -> Callable[[], Any] | None:
    from importlib.metadata import EntryPoint

    return checks.attempt(info.key, EntryPoint(info.name, info.target, info.group).load, lambda _target: None)


def _import_vllm() -> str:
    import vllm

    return str(vllm.__version__)


def _import_vllm_without_compiler() -> str:
    """Imports vLLM without PyTorch's compiler, which takes most of the time of the import.

    Since 0.33, vLLM amends a table of the compiler at every import, and goes on if there is no compiler. Another
    release, with another PyTorch, may need it, and is then imported with it.
    """
    with _missing("torch._inductor"), contextlib.suppress(ImportError):
        return _import_vllm()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    return _import_vllm()


@contextlib.contextmanager
def _missing(module: str) -> Iterator[None]:
    """Makes an import of `module` fail as if it were not installed."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
            if name == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _platform() -> dict[str, Any]:
    from vllm.platforms import builtin_platform_plugins, current_platform

    from vllm_backplane.platform_choice import decision, failures

    cls = type(current_platform)
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "ours": getattr(cls, "is_backplane", False),
        "yields": not decision().activates,
        "reason": decision().reason,
        # Plugins of other distributions are checked by themselves.
        "failures": {name: fault for name, fault in failures.items() if name in builtin_platform_plugins},
    }


def _import_worker() -> None:
    from vllm_backplane.config.stages import WORKER as path

    module, _, name = path.rpartition(".")
    getattr(importlib.import_module(module), name)


def _check_runner() -> None:
    """Raises if vLLM would use a model runner that the device does not support; vLLM does not check the device."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    from vllm_backplane.runtime import runtime

    configured = envs.VLLM_USE_V2_MODEL_RUNNER
    if (HAS_TRITON if configured is None else configured) and not runtime().device.capabilities.triton:
        raise BackplaneError("vLLM would use its V2 model runner, which needs Triton on the device")


def _check_bindings(checks: CheckRunner) -> None:
    from vllm_backplane.binding import operator_callers, registry

    for layer in registry.BINDINGS:
        checks.attempt(
            f"{_BINDING}{layer.upstream} by {layer.replacement}", partial(_describe, "layer", layer, registry.check)
        )
    for hook in operator_callers.HOOKS:
        checks.attempt(
            f"{_HOOK}{hook.upstream} by {hook.replacement}", partial(_describe, hook.kind, hook, operator_callers.check)
        )


def _describe(kind: str, bound: Any, check: Callable[[Any], Any]) -> dict[str, Any]:
    from vllm_backplane.errors import BindingError

    fault = ""
    try:
        check(bound)
    except BindingError as wrong:
        fault = str(wrong)
    return {
        "kind": kind,
        "upstream": bound.upstream,
        "replacement": bound.replacement,
        "operators": bound.operators,
        "mark": "error" if fault else "ok",
        "fault": fault,
    }


# --- in the parent ----------------------------------------------------------------------------------------------------


def bindings_in_source() -> tuple[BindingInfo, ...]:
    """Looks every layer and other extension point up in the source of the installed vLLM, without importing it."""
    from vllm_backplane.binding.operator_callers import HOOKS
    from vllm_backplane.binding.registry import BINDINGS

    try:
        index = SymbolIndex(installed_tree())
    except PatchbayError:
        return ()  # vLLM is missing or declares no version, which another check reports
    bound: list[tuple[str, Any]] = [("layer", layer) for layer in BINDINGS]
    bound += [(hook.kind, hook) for hook in HOOKS]
    found = []
    for kind, each in bound:
        resolution = index.resolve_path(each.upstream)
        fault = f"{each.upstream} does not exist. {INSTALL_SUPPORTED}" if resolution.is_missing else ""
        mark: Mark = "error" if fault else "ok"
        found.append(BindingInfo(kind, each.upstream, each.replacement, each.operators, mark, fault))
    return tuple(found)


def judge(
    results: Mapping[str, CheckResult], found: Iterable[EntryPointInfo], in_source: Iterable[BindingInfo] = ()
) -> Examination:
    """Turns the results of the subprocess into findings, except those of plugins (see `plugins.judge`).

    `in_source` are the layers as `bindings_in_source` returns them. They count if the platform is Backplane's and the
    subprocess did not bind any.
    """
    findings: list[Finding] = []
    of_plugins = {key for info in found for key in (info.key, info.call_key)}
    bindings = [
        BindingInfo(**{**result.value, "operators": tuple(result.value["operators"])})
        for name, result in results.items()
        if name.startswith((_BINDING, _HOOK)) and result.fault is None
    ]
    if not bindings and PLATFORM in results and (results[PLATFORM].value or {}).get("ours"):
        bindings = list(in_source)
    findings += [
        error(f"{info.kind} {info.upstream}: {info.fault}", "install a vLLM that this version supports")
        for info in bindings
        if info.fault
    ]
    for name, result in results.items():
        if result.fault is not None and name not in of_plugins and name != PLATFORM:
            findings.append(error(f"{name}: {result.fault}", _remedy(name)))
    platform, of_platform = _judge_platform(results.get(PLATFORM))
    findings += of_platform
    version = results[VLLM].value if VLLM in results else None
    return Examination(version or "", platform, tuple(bindings), tuple(findings))


def _judge_platform(result: CheckResult | None) -> tuple[PlatformInfo, list[Finding]]:
    remedy = "fix the other errors first; if there are none, report this one to the makers of vllm-backplane"
    if result is None:
        return PlatformInfo("", "-"), []
    if result.fault is not None:
        return PlatformInfo("", "error"), [error(f"vLLM finds no platform: {result.fault}", remedy)]
    name = result.value["class"].rpartition(".")[2]
    reason = result.value["reason"]
    failed = [
        warning(
            f"vLLM's detection of the accelerator {accelerator!r} failed, and vLLM goes on without it: {fault}",
            "repair its driver, or ignore this if the machine has no such accelerator",
        )
        for accelerator, fault in result.value["failures"].items()
    ]
    if result.value["ours"]:
        return PlatformInfo(name, "ok", reason), failed
    if result.value["yields"]:
        what = f"vLLM would run on {name}, and Backplane yields: {reason}"
        return PlatformInfo(name, "warning", reason), [*failed, warning(what, HOW_TO_CHOOSE)]
    return PlatformInfo(name, "error"), [*failed, error(f"vLLM would run on {name}, not on Backplane", remedy)]


def _remedy(name: str) -> str:
    if name == RUNNER:
        return "set VLLM_USE_V2_MODEL_RUNNER=0"
    if name == VLLM:
        return "reinstall vLLM and its dependencies; 'python -c \"import vllm\"' shows the whole error"
    return "install a vLLM that this version supports, or reinstall vllm-backplane"
