"""What vLLM itself does here: which platform it picks, whether plugins load, whether every layer binds.

Runs in a process of its own, and does there what a vLLM process does at its start.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from vllm_backplane.doctor import plugins
from vllm_backplane.doctor.findings import Finding, Mark, error
from vllm_backplane.doctor.plugins import EntryPointInfo
from vllm_backplane.doctor.subprocess_checks import Step, Steps
from vllm_backplane.errors import BackplaneError

STAGE = f"{__name__}:examine"

VLLM = "import of vllm"
PLATFORM = "vLLM's platform"
WORKER = "import of the worker"
RUNNER = "the model runner"
_BINDING = "layer "
_HOOK = "hook "


@dataclass(frozen=True, slots=True)
class BindingInfo:
    """A layer or another extension point of vLLM, and what Backplane puts there."""

    kind: str
    upstream: str
    replacement: str
    operators: tuple[str, ...]
    mark: Mark
    fault: str


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """The platform that vLLM would use."""

    name: str
    """Its class; empty where there is none."""
    mark: Mark


@dataclass(frozen=True, slots=True)
class Examination:
    imported_version: str
    platform: PlatformInfo
    bindings: tuple[BindingInfo, ...]
    findings: tuple[Finding, ...]


def request(found: Iterable[EntryPointInfo], environment: Mapping[str, str]) -> dict[str, Any]:
    allowed = plugins.allowed_names(environment)
    return {"plugins": [asdict(info) for info in found if plugins.is_allowed(info, allowed)]}


# --- in the child -----------------------------------------------------------------------------------------------------


def examine(steps: Steps, request: Mapping[str, Any]) -> None:
    """In vLLM's order: platform plugins, the platform, general plugins; then what comes later or not at all."""
    infos = [EntryPointInfo(**info) for info in request["plugins"]]
    if steps.attempt(VLLM, _import_vllm) is None:
        return
    loaded = {info: _load(steps, info) for info in infos if info.group == plugins.PLATFORM_GROUP}
    for info, function in loaded.items():
        if function is not None:
            steps.attempt(info.call_key, function)
    platform = steps.attempt(PLATFORM, _platform)
    ours = platform is not None and platform["ours"]
    for info in infos:
        if info.group == plugins.GENERAL_GROUP:
            function = _load(steps, info)
            if function is not None and (ours or not info.ours):
                steps.attempt(info.call_key, function, lambda _result: None)
    if ours:
        _check_bindings(steps)
        steps.attempt(WORKER, _import_worker)
        steps.attempt(RUNNER, _check_runner)
    for info in infos:
        if info.group not in plugins.CALLED:
            _load(steps, info)


def _load(steps: Steps, info: EntryPointInfo) -> Callable[[], Any] | None:
    from importlib.metadata import EntryPoint

    return steps.attempt(info.key, EntryPoint(info.name, info.target, info.group).load, lambda _target: None)


def _import_vllm() -> str:
    import vllm

    return str(vllm.__version__)


def _platform() -> dict[str, Any]:
    from vllm.platforms import current_platform

    cls = type(current_platform)
    return {"class": f"{cls.__module__}.{cls.__qualname__}", "ours": getattr(cls, "is_backplane", False)}


def _import_worker() -> None:
    from vllm_backplane.config.stages import WORKER as path

    module, _, name = path.rpartition(".")
    getattr(importlib.import_module(module), name)


def _check_runner() -> None:
    """vLLM chooses between its two model runners without asking the device."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    from vllm_backplane.runtime import runtime

    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    if (HAS_TRITON if asked is None else asked) and not runtime().device.capabilities.triton:
        raise BackplaneError("vLLM would use its second model runner, which needs Triton on the device")


def _check_bindings(steps: Steps) -> None:
    from vllm_backplane.binding import hooks, registry

    for layer in registry.BINDINGS:
        steps.attempt(_BINDING + layer.upstream, partial(_describe, "layer", layer, registry.check))
    for hook in hooks.HOOKS:
        steps.attempt(_HOOK + hook.upstream, partial(_describe, hook.kind, hook, hooks.check))


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


def judge(steps: Mapping[str, Step], found: Iterable[EntryPointInfo]) -> Examination:
    """Without the plugins themselves, which `plugins.judge` looks at."""
    findings: list[Finding] = []
    of_plugins = {key for info in found for key in (info.key, info.call_key)}
    bindings = []
    for name, step in steps.items():
        if name.startswith((_BINDING, _HOOK)) and step.fault is None:
            info = BindingInfo(**{**step.value, "operators": tuple(step.value["operators"])})
            bindings.append(info)
            if info.fault:
                findings.append(
                    error(f"{info.kind} {info.upstream}: {info.fault}", "install a vLLM that this version supports")
                )
        elif step.fault is not None and name not in of_plugins and name != PLATFORM:
            findings.append(error(f"{name}: {step.fault}", _remedy(name)))
    platform, of_platform = _judge_platform(steps.get(PLATFORM))
    findings += of_platform
    version = steps[VLLM].value if VLLM in steps else None
    return Examination(version or "", platform, tuple(bindings), tuple(findings))


def _judge_platform(step: Step | None) -> tuple[PlatformInfo, list[Finding]]:
    remedy = "mend the other errors first; without any, this one is worth a report to the makers of vllm-backplane"
    if step is None:
        return PlatformInfo("", "-"), []
    if step.fault is not None:
        return PlatformInfo("", "error"), [error(f"vLLM finds no platform: {step.fault}", remedy)]
    name = step.value["class"].rpartition(".")[2]
    if step.value["ours"]:
        return PlatformInfo(name, "ok"), []
    return PlatformInfo(name, "error"), [error(f"vLLM would run on {name}, not on Backplane", remedy)]


def _remedy(name: str) -> str:
    if name == RUNNER:
        return "set VLLM_USE_V2_MODEL_RUNNER=0"
    if name == VLLM:
        return "reinstall vLLM and what it needs; 'python -c \"import vllm\"' shows the whole error"
    return "install a vLLM that this version supports, or reinstall vllm-backplane"
