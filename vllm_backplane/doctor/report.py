"""The whole examination, from cheap to expensive. Each part runs whatever the others found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from vllm_backplane.doctor import devices, options, plugins, software, subprocess_checks, vllm_host
from vllm_backplane.doctor.devices import Chosen, DeviceInfo, OperatorInfo
from vllm_backplane.doctor.findings import Finding
from vllm_backplane.doctor.options import OptionInfo
from vllm_backplane.doctor.plugins import Plugin
from vllm_backplane.doctor.software import Component
from vllm_backplane.doctor.vllm_host import BindingInfo, PlatformInfo


@dataclass(frozen=True, slots=True)
class Environment:
    """Variables of vLLM's that decide about plugins, None where not set."""

    vllm_plugins: str | None
    vllm_target_device: str | None
    plugin_filter: str
    """What VLLM_PLUGINS does, in words."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `vllm-backplane doctor` prints, and the keys of its JSON."""

    backplane: str
    """Version of vllm-backplane."""
    serves: bool
    software: tuple[Component, ...]
    environment: Environment
    plugins: tuple[Plugin, ...]
    options: tuple[OptionInfo, ...]
    devices: tuple[DeviceInfo, ...]
    chosen: Chosen | None
    operators: tuple[OperatorInfo, ...]
    platform: PlatformInfo
    bindings: tuple[BindingInfo, ...]
    findings: tuple[Finding, ...]


def examine(
    additional_config: str | None = None,
    environment: Mapping[str, str] = os.environ,
    step_limit: float = subprocess_checks.STEP_LIMIT,
) -> Report:
    config, findings = options.parse_additional_config(additional_config)
    python, of_python = software.check_python()
    torch, of_torch = software.check_torch()
    vllm, of_vllm = software.check_vllm()
    found = plugins.find()
    findings += [
        *of_python,
        *of_torch,
        *of_vllm,
        *software.check_requirements(),
        *plugins.check_environment(found, environment),
    ]

    with ThreadPoolExecutor(2) as pool:
        # Two processes, because most of the time goes into imports.
        without_vllm = pool.submit(
            subprocess_checks.run, devices.STAGE, {"additional_config": config}, environment, step_limit
        )
        with_vllm = pool.submit(
            subprocess_checks.run, vllm_host.STAGE, vllm_host.request(found, environment), environment, step_limit
        )
        device_steps, host_steps = without_vllm.result(), with_vllm.result()

    on_device = devices.judge(device_steps)
    on_host = vllm_host.judge(host_steps, found)
    tried, of_plugins = plugins.judge(found, environment, host_steps)
    findings += on_device.findings
    if on_host.imported_version:
        findings += software.check_import(vllm, on_host.imported_version)
    findings += [finding for finding in of_plugins if not _is_told(finding, findings)]
    findings += [finding for finding in on_host.findings if not _is_told(finding, findings)]
    findings.sort(key=lambda finding: finding.severity)  # errors first, otherwise in the order of the examination

    torch = replace(torch, note="; ".join(filter(None, (torch.note, on_device.torch_note))))
    if not vllm.version:
        vllm = replace(vllm, version=on_host.imported_version)
    return Report(
        backplane=_own_version(),
        serves=not any(finding.severity == "error" for finding in findings),
        software=(python, torch, vllm),
        environment=Environment(
            environment.get(plugins.FILTER), environment.get(plugins.TARGET), plugins.describe_filter(environment)
        ),
        plugins=tried,
        options=on_device.options,
        devices=on_device.devices,
        chosen=on_device.chosen,
        operators=on_device.operators,
        platform=on_host.platform,
        bindings=on_host.bindings,
        findings=tuple(findings),
    )


def _is_told(finding: Finding, earlier: list[Finding]) -> bool:
    """vLLM stumbles over what was found before, and quotes it."""
    return any(other.what in finding.what for other in earlier)


def _own_version() -> str:
    try:
        return version(plugins.OUR_DISTRIBUTION)
    except PackageNotFoundError:
        return ""
