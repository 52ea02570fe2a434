"""Resolves the options, and chooses the device of this process, once.

vLLM starts several processes, and each of them builds its own platform with the functions here. The device is
therefore chosen only by what every process has in common: the environment and the installed distributions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vllm_backplane.device import Device, DeviceEntry, Selection, discover, select
from vllm_backplane.errors import OptionError
from vllm_backplane.own_options import OPTIONS, misplaced_option
from vllm_backplane.settings.options import SECTION, Scopes, Setting, resolve


@dataclass(frozen=True, slots=True)
class Runtime:
    """Holds the chosen device with the resolved options."""

    entries: Mapping[str, DeviceEntry]
    """All discovered devices by name."""
    selection: Selection
    device: Device
    settings: Mapping[str, Mapping[str, Setting]]
    """Resolved options by device name and key; the name "" holds Backplane's own options."""

    def setting(self, key: str) -> Any:
        """Returns the value of one of Backplane's own options."""
        return self.settings[""][key].value

    @property
    def guard_checks_modules(self) -> bool:
        """Returns whether the numeric guard checks modules when Python calls them. A replayed graph calls none."""
        return bool({"layers", "modules"} & set(self.setting("numeric_guard")))


def scopes(entries: Mapping[str, DeviceEntry]) -> Scopes:
    """Returns the options of Backplane (under the name "") and of every discovered device."""
    return {"": OPTIONS, **{name: entry.options() for name, entry in entries.items()}}


def _settings(entries: Mapping[str, DeviceEntry], section: Mapping[str, Any]) -> dict[str, dict[str, Setting]]:
    return resolve(scopes(entries), section, os.environ)


def _device_values(settings: Mapping[str, Mapping[str, Setting]], device: str) -> dict[str, Any]:
    return {key: setting.value for key, setting in settings[device].items()}


def choose(section: Mapping[str, Any] | None = None, name: str | None = None) -> Runtime:
    """Discovers the devices, resolves the options and returns the chosen device without loading it.

    The device is `name` if given, else the one that the option ``device`` requests, else the available one with the
    highest priority. Raises a BackplaneError with the remedy if it cannot be used.
    """
    entries = discover()
    early = _settings(entries, {})
    requested = early[""]["device"]
    selection = select(entries, name, "--device") if name else select(entries, requested.value, requested.source)
    settings = _settings(entries, section or {})
    _refuse_late(settings, early, selection)
    device = selection.entry.device_class()(_device_values(settings, selection.entry.name))
    return Runtime(entries, selection, device, settings)


def _refuse_late(
    settings: Mapping[str, Mapping[str, Setting]], early: Mapping[str, Mapping[str, Setting]], selection: Selection
) -> None:
    """Raises an OptionError for an option in --additional-config whose value was needed before it was read."""
    if settings[""]["patch_drift"].value != early[""]["patch_drift"].value:
        raise OptionError(
            "patch_drift is needed before --additional-config is read; set the variable BACKPLANE_PATCH_DRIFT instead"
        )
    requested = settings[""]["device"]
    if requested.value is not None and requested.value != selection.entry.name and "additional" in requested.source:
        raise OptionError(
            f"--additional-config requests device {requested.value!r}, but this process started on "
            f"{selection.entry.name!r} ({selection.reason}). vLLM reads that option after the platform is chosen: set "
            f"BACKPLANE_DEVICE={requested.value}, or use 'vllm-backplane serve --device {requested.value}'."
        )


@cache
def runtime() -> Runtime:
    """Returns the device of this process, loaded and ready for tensors."""
    chosen = choose()
    _refuse_settings(chosen.device)
    chosen.device.load()
    return chosen


def _refuse_settings(device: Device) -> None:
    for problem, remedy in device.faulty_settings():
        raise OptionError(f"{problem}; {remedy}")


def configured(additional_config: Any) -> Runtime:
    """Returns `runtime()` with the options of a vLLM configuration added. The device stays the same object."""
    chosen = runtime()
    settings = _settings(chosen.entries, section_of(additional_config))
    _refuse_late(settings, chosen.settings, chosen.selection)
    chosen.device.settings = _device_values(settings, chosen.selection.entry.name)
    _refuse_settings(chosen.device)
    return replace(chosen, settings=settings)


def section_of(additional_config: Any) -> Mapping[str, Any]:
    """Returns Backplane's section of vLLM's --additional-config; raises an OptionError for a misspelt section."""
    if not isinstance(additional_config, Mapping):
        return {}
    fault = misplaced_option(additional_config, discover())
    if fault is not None:
        raise OptionError(fault)
    section = additional_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise OptionError(f"the section {SECTION!r} of --additional-config is {section!r}; give an object with options")
    return section
