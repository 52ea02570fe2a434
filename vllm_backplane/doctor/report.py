"""Runs all checks, from cheap to expensive, and collects their results. Each part runs even if another found errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from vllm_backplane.doctor import devices, options, plugins, software, subprocess_checks, vllm_checks
from vllm_backplane.doctor.devices import Chosen, DeviceInfo, OperatorInfo
from vllm_backplane.doctor.findings import Finding
from vllm_backplane.doctor.options import OptionInfo
from vllm_backplane.doctor.plugins import Plugin
from vllm_backplane.doctor.software import Component
from vllm_backplane.doctor.vllm_checks import BindingInfo, PlatformInfo


@dataclass(frozen=True, slots=True)
class Environment:
    """Holds vLLM's variables that control plugins; None where a variable is not set."""

    vllm_plugins: str | None
    vllm_target_device: str | None
    plugin_filter: str
    """A sentence that explains the effect of VLLM_PLUGINS."""


@dataclass(frozen=True, slots=True)
class Report:
    """Holds the report of `vllm-backplane doctor`; the field names are the keys of its JSON."""

    backplane: str
    """Version of vllm-backplane."""
    full: bool
    """Whether every layer was bound, instead of being looked up in vLLM's source."""
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
    timeout: float = subprocess_checks.CHECK_TIMEOUT,
    *,
    full: bool = False,
) -> Report:
    """Examines the installation. `timeout` is the limit in seconds for one check in a subprocess.

    With `full`, vLLM is imported as far as a server imports it, and every layer is bound; otherwise layers are looked
    up in vLLM's source, which takes a third of the time.
    """
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
        *software.check_requirements_of_vllm(vllm.distribution),
        *plugins.check_environment(found, environment),
    ]

    with ThreadPoolExecutor(2) as pool:
        # Two subprocesses run in parallel, because imports take most of the time.
        without_vllm = pool.submit(
            subprocess_checks.run, devices.CHECKS, {"additional_config": config}, environment, timeout
        )
        with_vllm = pool.submit(
            subprocess_checks.run,
            vllm_checks.CHECKS,
            vllm_checks.request(found, environment, full),
            environment,
            timeout,
        )
        in_source = () if full else vllm_checks.bindings_in_source()
        device_results, host_results = without_vllm.result(), with_vllm.result()

    on_device = devices.judge(device_results)
    on_host = vllm_checks.judge(host_results, found, in_source)
    loaded, of_plugins = plugins.judge(found, environment, host_results)
    findings += on_device.findings
    if on_host.imported_version:
        findings += software.check_import(vllm, on_host.imported_version)
    findings += [finding for finding in of_plugins if not _is_reported(finding, findings)]
    findings += [finding for finding in on_host.findings if not _is_reported(finding, findings)]
    findings.sort(key=lambda finding: finding.severity)  # errors first, otherwise in the order of the examination

    torch = replace(torch, note="; ".join(filter(None, (torch.note, on_device.torch_note))))
    if not vllm.version:
        vllm = replace(vllm, version=on_host.imported_version)
    return Report(
        backplane=_own_version(),
        full=full,
        serves=not any(finding.severity == "error" for finding in findings),
        software=(python, torch, vllm),
        environment=Environment(
            environment.get(plugins.FILTER), environment.get(plugins.TARGET), plugins.describe_filter(environment)
        ),
        plugins=loaded,
        options=on_device.options,
        devices=on_device.devices,
        chosen=on_device.chosen,
        operators=on_device.operators,
        platform=on_host.platform,
        bindings=on_host.bindings,
        findings=tuple(findings),
    )


def _is_reported(finding: Finding, earlier: list[Finding]) -> bool:
    """Returns whether an earlier finding is the cause: vLLM fails for the same reason and quotes its text."""
    return any(other.what in finding.what for other in earlier)


def _own_version() -> str:
    try:
        return version(plugins.OUR_DISTRIBUTION)
    except PackageNotFoundError:
        return ""
