"""Checks Backplane's own options and the name of the device, without importing a device.

Options of a device are declared by its class, whose module imports torch. They are checked when vLLM loads the
platform.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from typing import Any

from vllm_backplane.errors import UsageError, nearest, short_repr
from vllm_backplane.own_options import OPTIONS, misplaced_option
from vllm_backplane.platform_choice import DEVICE_VARIABLE
from vllm_backplane.settings.options import DEVICE_GROUP, PREFIX, SECTION, Option, resolve, text


def device_names() -> set[str]:
    """Returns the names of the installed devices, from the metadata of distributions alone."""
    return {point.name for point in entry_points(group=DEVICE_GROUP)}


def require_device(requested: str | None, by: str, devices: Collection[str]) -> None:
    """Raises UsageError if no distribution provides the requested device."""
    if requested and devices and requested not in devices:
        raise UsageError(
            f"{by} requests device {short_repr(requested)}, which no installed distribution provides"
            f"{nearest(requested, devices)} Installed: {', '.join(sorted(devices))}."
        )


def check_own_options(additional_config: str | None, environment: Mapping[str, str], devices: Collection[str]) -> None:
    """Raises UsageError for a mistake in Backplane's section of --additional-config, or in a variable of Backplane."""
    of_devices = {device: Option("", None, text, "").variable(device) for device in devices}
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX) and not name.startswith(tuple(of_devices.values()))
    }
    section = _section(additional_config, devices)
    given = {key: value for key, value in section.items() if key not in devices}
    for key in section.keys() & set(devices):
        if not isinstance(section[key], Mapping):
            raise UsageError(f"option {key!r} in --additional-config must be an object with the options of that device")
    resolve({"": OPTIONS, **dict.fromkeys(devices, ())}, given, variables)
    require_device(environment.get(DEVICE_VARIABLE), DEVICE_VARIABLE, devices)


def _section(additional_config: str | None, devices: Collection[str]) -> Mapping[str, Any]:
    if additional_config is None:
        return {}
    config = json.loads(additional_config, strict=False)  # the syntax was checked with the options of vLLM
    if not isinstance(config, Mapping):
        raise UsageError(
            f"--additional-config is {short_repr(additional_config)}; give an object, such as "
            """'{"backplane": {"memory_share": 0.5}}'"""
        )
    if (fault := misplaced_option(config, devices)) is not None:
        raise UsageError(fault)
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise UsageError(f"the section {SECTION!r} of --additional-config is {section!r}; give an object with options")
    return section
