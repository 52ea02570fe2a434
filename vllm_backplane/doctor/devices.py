"""Checks torch, the devices, the options and the operators, all without vLLM, in a subprocess."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_backplane.doctor import options
from vllm_backplane.doctor.findings import Finding, Mark, error, warning
from vllm_backplane.doctor.options import OptionInfo, ValidOptions
from vllm_backplane.doctor.subprocess_checks import CheckResult, CheckRunner
from vllm_backplane.settings.options import PREFIX, SECTION

if TYPE_CHECKING:
    from vllm_backplane.device import Device, DeviceEntry
    from vllm_backplane.runtime import Runtime

CHECKS = f"{__name__}:examine"
"""The function that the subprocess runs."""

TORCH = "torch"
DISCOVERY = "entry points of devices"
OPTIONS = "options"
SELECTION = "selection of the device"
SETTINGS = "settings of the device"
START = "start of the device"
MEMORY = "memory of the device"
KERNELS = "kernels of the device"
OPERATORS = "operators"


def probe_check(name: str) -> str:
    """Returns the name of the check that probes a device."""
    return f"device {name}"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Describes a device of this installation and the result of its probe."""

    name: str
    distribution: str
    available: bool
    count: int
    broken: bool
    """Whether the probe itself failed, instead of reporting that no card is available."""
    reason: str
    remedy: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Chosen:
    """Describes the device that would be used."""

    name: str
    reason: str
    card: str
    compute_units: int
    memory_total: int
    memory_free: int


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """Describes an operator and the implementation that it would run."""

    operator: str
    family: str
    implementation: str
    provider: str
    reason: str


@dataclass(frozen=True, slots=True)
class Examination:
    """Holds the results of all checks of this module."""

    torch_note: str
    devices: tuple[DeviceInfo, ...]
    chosen: Chosen | None
    options: tuple[OptionInfo, ...]
    operators: tuple[OperatorInfo, ...]
    findings: tuple[Finding, ...]


# --- in the child -----------------------------------------------------------------------------------------------------


def examine(checks: CheckRunner, request: Mapping[str, Any]) -> None:
    """Runs all checks. `request["additional_config"]` is the value of vLLM's --additional-config."""
    if checks.attempt(TORCH, _describe_torch) is None:
        return
    from vllm_backplane.device import discover

    entries = checks.attempt(DISCOVERY, discover, lambda found: {name: entry.source for name, entry in found.items()})
    if entries is None:
        return
    usable = {
        name: entry
        for name, entry in sorted(entries.items())
        if checks.attempt(probe_check(name), partial(describe_device, entry)) is not None
    }
    valid = checks.attempt(OPTIONS, lambda: _validate(usable, request["additional_config"]), _options_as_json)
    if valid is None:
        return
    chosen = checks.attempt(SELECTION, lambda: _choose(valid), _choice_as_json)
    if chosen is None:
        return
    device = chosen.device
    checks.attempt(SETTINGS, device.faulty_settings)
    if checks.attempt(START, lambda: _start(device)) is None:
        return
    checks.attempt(MEMORY, device.memory, dataclasses.asdict)
    checks.attempt(KERNELS, lambda: _load_kernels(device))
    checks.attempt(OPERATORS, lambda: _operators(device, chosen.setting("reference_ops")))


def _describe_torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "built_for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "",
        "cuda_available": torch.cuda.is_available(),
    }


def describe_device(entry: DeviceEntry) -> dict[str, Any]:
    """Probes a device and returns the result for `DeviceInfo`."""
    probe = entry.probe()
    return {**dataclasses.asdict(probe), "source": entry.source, "broken": not probe.available and _is_broken(entry)}


def _is_broken(entry: DeviceEntry) -> bool:
    """Returns whether the probe raises. `DeviceEntry.probe` reports an exception like an unavailable device."""
    try:
        entry.device_class().probe()
    except Exception:
        return True
    return False


def _validate(entries: Mapping[str, DeviceEntry], config: Mapping[str, Any]) -> ValidOptions:
    from vllm_backplane.runtime import scopes

    return options.validate(scopes(entries), config.get(SECTION, {}), os.environ)


def _options_as_json(valid: ValidOptions) -> dict[str, Any]:
    described = [dataclasses.asdict(info) for info in options.describe(valid.settings, os.environ)]
    return {"options": described, "findings": [dataclasses.asdict(finding) for finding in valid.findings]}


def _choose(valid: ValidOptions) -> Runtime:
    """Chooses the device as a vLLM process does, without the invalid options, which are already reported."""
    from vllm_backplane.runtime import choose

    for variable in [name for name in os.environ if name.startswith(PREFIX)]:
        if variable not in valid.variables:
            del os.environ[variable]
    return choose(valid.given)


def _choice_as_json(chosen: Runtime) -> dict[str, str]:
    return {"name": chosen.selection.entry.name, "reason": chosen.selection.reason}


def _start(device: Device) -> dict[str, Any]:
    device.load()
    return dataclasses.asdict(device.properties())


def _load_kernels(device: Device) -> list[tuple[str, str]]:
    device.load_kernels()
    return list(device.problems())


def _operators(device: Device, forced: tuple[str, ...]) -> list[dict[str, Any]]:
    from vllm_backplane.ops import resolution

    return [
        dataclasses.asdict(line) for line in resolution.resolve(device.dispatch_key, device.kernel_provider(), forced)
    ]


# --- in the parent ----------------------------------------------------------------------------------------------------


def judge(results: Mapping[str, CheckResult]) -> Examination:
    """Turns the results of the subprocess into findings."""
    findings: list[Finding] = []
    devices = _judge_devices(results, findings)
    options: list[OptionInfo] = []
    if (valid := _value(results, OPTIONS)) is not None:
        options = [OptionInfo(**info) for info in valid["options"]]
        findings += [Finding(**finding) for finding in valid["findings"]]
    chosen = _judge_choice(results)
    findings += [error(what, remedy) for what, remedy in _value(results, SETTINGS) or []]
    problems = _value(results, KERNELS) or []
    findings += [warning(what, remedy) for what, remedy in problems]
    operators = [OperatorInfo(**line) for line in _value(results, OPERATORS) or []]
    findings += _faults(results, devices)
    return Examination(_judge_torch(results), devices, chosen, tuple(options), tuple(operators), tuple(findings))


def _value(results: Mapping[str, CheckResult], name: str) -> Any:
    return results[name].value if name in results else None


def _judge_torch(results: Mapping[str, CheckResult]) -> str:
    torch = _value(results, TORCH)
    if torch is None:
        return "cannot be imported"
    if torch["built_for"] and not torch["cuda_available"]:
        return f"built for {torch['built_for']} without a usable GPU here: larger than needed, otherwise fine"
    return f"built for {torch['built_for']}" if torch["built_for"] else ""


def _judge_devices(results: Mapping[str, CheckResult], findings: list[Finding]) -> tuple[DeviceInfo, ...]:
    devices = []
    for name, source in sorted((_value(results, DISCOVERY) or {}).items()):
        result = results.get(probe_check(name), CheckResult(fault="was not run"))
        if result.fault is not None:
            remedy = f"repair or uninstall {source}"
            findings.append(error(f"the probe of device {name!r} of {source} failed: it {result.fault}", remedy))
            devices.append(DeviceInfo(name, source, False, 0, True, result.fault, remedy, "error"))
            continue
        probe = result.value
        mark: Mark = "ok" if probe["available"] else "warning" if probe["broken"] else "-"
        devices.append(
            DeviceInfo(
                name,
                source,
                probe["available"],
                probe["count"],
                probe["broken"],
                probe["reason"],
                probe["remedy"],
                mark,
            )
        )
        if probe["broken"]:
            findings.append(warning(f"device {name!r} of {source} is broken: {probe['reason']}", probe["remedy"]))
    return tuple(devices)


def _judge_choice(results: Mapping[str, CheckResult]) -> Chosen | None:
    selection, card, memory = (_value(results, name) for name in (SELECTION, START, MEMORY))
    if selection is None:
        return None
    card, memory = card or {"name": "", "compute_units": 0}, memory or {"total": 0, "free": 0}
    return Chosen(
        selection["name"], selection["reason"], card["name"], card["compute_units"], memory["total"], memory["free"]
    )


def _faults(results: Mapping[str, CheckResult], devices: tuple[DeviceInfo, ...]) -> list[Finding]:
    """Returns findings for all failed checks except the probes of devices."""
    chosen = (_value(results, SELECTION) or {}).get("name", "")
    source = next((device.distribution for device in devices if device.name == chosen), "its distribution")
    choices = ", ".join(device.name for device in devices if device.available) or "none"
    remedies = {
        TORCH: "reinstall torch; 'python -c \"import torch\"' shows the whole error",
        DISCOVERY: "reinstall vllm-backplane, or uninstall one of two distributions that provide the same device",
        SELECTION: f"set BACKPLANE_DEVICE to a device that is available ({choices}), or leave it unset",
        OPERATORS: "correct BACKPLANE_REFERENCE_OPS or reference_ops; 'vllm-backplane ops' lists the operators",
    }
    probes = {probe_check(device.name) for device in devices}
    return [
        error(
            result.fault if name in (SELECTION, DISCOVERY) else f"{name}: {result.fault}",
            remedies.get(name, f"repair or update {source}, or choose another device with BACKPLANE_DEVICE"),
        )
        for name, result in results.items()
        if result.fault is not None and name not in probes
    ]
