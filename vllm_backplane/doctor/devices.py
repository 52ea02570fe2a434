"""torch, the devices, the options, the operators: all that does not need vLLM. Runs in a process of its own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_backplane.doctor import options
from vllm_backplane.doctor.findings import Finding, Mark, error, warning
from vllm_backplane.doctor.options import OptionInfo, Settled
from vllm_backplane.doctor.subprocess_checks import Step, Steps
from vllm_backplane.settings.options import PREFIX, SECTION

if TYPE_CHECKING:
    from vllm_backplane.device import Device, DeviceEntry
    from vllm_backplane.runtime import Runtime

STAGE = f"{__name__}:examine"

TORCH = "torch"
DISCOVERY = "the devices' entry points"
OPTIONS = "options"
SELECTION = "choice of the device"
SETTINGS = "settings of the device"
START = "start of the device"
MEMORY = "memory of the device"
KERNELS = "kernels of the device"
OPERATORS = "operators"


def step_of(name: str) -> str:
    return f"device {name}"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    name: str
    distribution: str
    available: bool
    count: int
    broken: bool
    """It failed to be asked, rather than answered that it is not there."""
    reason: str
    remedy: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Chosen:
    """The device that would be used."""

    name: str
    reason: str
    card: str
    compute_units: int
    memory_total: int
    memory_free: int


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    operator: str
    family: str
    implementation: str
    provider: str
    reason: str


@dataclass(frozen=True, slots=True)
class Examination:
    torch_note: str
    devices: tuple[DeviceInfo, ...]
    chosen: Chosen | None
    options: tuple[OptionInfo, ...]
    operators: tuple[OperatorInfo, ...]
    findings: tuple[Finding, ...]


# --- in the child -----------------------------------------------------------------------------------------------------


def examine(steps: Steps, request: Mapping[str, Any]) -> None:
    """`request` has "additional_config"."""
    if steps.attempt(TORCH, _describe_torch) is None:
        return
    from vllm_backplane.device import discover

    entries = steps.attempt(DISCOVERY, discover, lambda found: {name: entry.source for name, entry in found.items()})
    if entries is None:
        return
    usable = {
        name: entry
        for name, entry in sorted(entries.items())
        if steps.attempt(step_of(name), partial(describe_device, entry)) is not None
    }
    settled = steps.attempt(OPTIONS, lambda: _settle(usable, request["additional_config"]), _show_settled)
    if settled is None:
        return
    chosen = steps.attempt(SELECTION, lambda: _choose(settled), _show_choice)
    if chosen is None:
        return
    device = chosen.device
    steps.attempt(SETTINGS, device.faulty_settings)
    if steps.attempt(START, lambda: _start(device)) is None:
        return
    steps.attempt(MEMORY, device.memory, dataclasses.asdict)
    steps.attempt(KERNELS, lambda: _load_kernels(device))
    steps.attempt(OPERATORS, lambda: _operators(device, chosen.setting("reference_ops")))


def _describe_torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "built_for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "",
        "cuda_available": torch.cuda.is_available(),
    }


def describe_device(entry: DeviceEntry) -> dict[str, Any]:
    probe = entry.probe()
    return {**dataclasses.asdict(probe), "source": entry.source, "broken": not probe.available and _is_broken(entry)}


def _is_broken(entry: DeviceEntry) -> bool:
    """`DeviceEntry.probe` turns every failure into a reason; here it matters whether the device itself gave it."""
    try:
        entry.device_class().probe()
    except Exception:
        return True
    return False


def _settle(entries: Mapping[str, DeviceEntry], config: Mapping[str, Any]) -> Settled:
    from vllm_backplane.runtime import scopes

    return options.settle(scopes(entries), config.get(SECTION, {}), os.environ)


def _show_settled(settled: Settled) -> dict[str, Any]:
    described = [dataclasses.asdict(info) for info in options.describe(settled.settings, os.environ)]
    return {"options": described, "findings": [dataclasses.asdict(finding) for finding in settled.findings]}


def _choose(settled: Settled) -> Runtime:
    """What a vLLM process does, with the faulty options left out: they are told already."""
    from vllm_backplane.runtime import choose

    for variable in [name for name in os.environ if name.startswith(PREFIX)]:
        if variable not in settled.variables:
            del os.environ[variable]
    return choose(settled.given)


def _show_choice(chosen: Runtime) -> dict[str, str]:
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


def judge(steps: Mapping[str, Step]) -> Examination:
    findings: list[Finding] = []
    devices = _judge_devices(steps, findings)
    options: list[OptionInfo] = []
    if (settled := _value(steps, OPTIONS)) is not None:
        options = [OptionInfo(**info) for info in settled["options"]]
        findings += [Finding(**finding) for finding in settled["findings"]]
    chosen = _judge_choice(steps)
    findings += [error(what, remedy) for what, remedy in _value(steps, SETTINGS) or []]
    problems = _value(steps, KERNELS) or []
    findings += [warning(what, remedy) for what, remedy in problems]
    operators = [OperatorInfo(**line) for line in _value(steps, OPERATORS) or []]
    findings += _faults(steps, devices)
    return Examination(_judge_torch(steps), devices, chosen, tuple(options), tuple(operators), tuple(findings))


def _value(steps: Mapping[str, Step], name: str) -> Any:
    return steps[name].value if name in steps else None


def _judge_torch(steps: Mapping[str, Step]) -> str:
    torch = _value(steps, TORCH)
    if torch is None:
        return "cannot be imported"
    if torch["built_for"] and not torch["cuda_available"]:
        return f"built for {torch['built_for']}, and no usable GPU is here: larger than needed, otherwise fine"
    return f"built for {torch['built_for']}" if torch["built_for"] else ""


def _judge_devices(steps: Mapping[str, Step], findings: list[Finding]) -> tuple[DeviceInfo, ...]:
    devices = []
    for name, source in sorted((_value(steps, DISCOVERY) or {}).items()):
        step = steps.get(step_of(name), Step(fault="was not asked"))
        if step.fault is not None:
            remedy = f"repair or uninstall {source}"
            findings.append(error(f"asking device {name!r} of {source}: it {step.fault}", remedy))
            devices.append(DeviceInfo(name, source, False, 0, True, step.fault, remedy, "error"))
            continue
        told = step.value
        mark: Mark = "ok" if told["available"] else "warning" if told["broken"] else "-"
        devices.append(
            DeviceInfo(
                name, source, told["available"], told["count"], told["broken"], told["reason"], told["remedy"], mark
            )
        )
        if told["broken"]:
            findings.append(warning(f"device {name!r} of {source} is broken: {told['reason']}", told["remedy"]))
    return tuple(devices)


def _judge_choice(steps: Mapping[str, Step]) -> Chosen | None:
    selection, card, memory = (_value(steps, name) for name in (SELECTION, START, MEMORY))
    if selection is None:
        return None
    card, memory = card or {"name": "", "compute_units": 0}, memory or {"total": 0, "free": 0}
    return Chosen(
        selection["name"], selection["reason"], card["name"], card["compute_units"], memory["total"], memory["free"]
    )


def _faults(steps: Mapping[str, Step], devices: tuple[DeviceInfo, ...]) -> list[Finding]:
    """What the remaining steps stumbled over."""
    chosen = (_value(steps, SELECTION) or {}).get("name", "")
    source = next((device.distribution for device in devices if device.name == chosen), "its distribution")
    choices = ", ".join(device.name for device in devices if device.available) or "none"
    remedies = {
        TORCH: "reinstall torch; 'python -c \"import torch\"' shows the whole error",
        DISCOVERY: "reinstall vllm-backplane and uninstall one of two distributions that offer the same device",
        SELECTION: f"set BACKPLANE_DEVICE to a device that is available ({choices}), or leave it unset",
        OPERATORS: "correct BACKPLANE_REFERENCE_OPS or reference_ops; 'vllm-backplane ops' lists the operators",
    }
    device_steps = {step_of(device.name) for device in devices}
    return [
        error(
            step.fault if name in (SELECTION, DISCOVERY) else f"{name}: {step.fault}",
            remedies.get(name, f"repair or update {source}, or choose another device with BACKPLANE_DEVICE"),
        )
        for name, step in steps.items()
        if step.fault is not None and name not in device_steps
    ]
