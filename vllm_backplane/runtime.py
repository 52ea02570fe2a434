"""The device of this process, chosen once.

vLLM starts several processes, and each builds its platform by itself; all of them come here. What decides the
device is therefore only what every process sees: the environment and the installed distributions.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vllm_backplane.device import Device, DeviceEntry, Selection, discover, select
from vllm_backplane.errors import OptionError
from vllm_backplane.peering.addresses import loopback_text
from vllm_backplane.settings.options import (
    SECTION,
    Option,
    Scopes,
    Setting,
    fraction,
    group_size,
    names,
    one_of,
    resolve,
    some_of,
    text,
)

OPTIONS: tuple[Option[Any], ...] = (
    Option(
        "device",
        None,
        text,
        "The device to run on. As a variable it chooses the device; in --additional-config, which is read after "
        "the platform exists, it only insists: another device is an error.",
    ),
    Option(
        "memory_share",
        None,
        fraction,
        "Share of the device's free memory at start that weights and KV cache may take; default: the device's own, "
        "or --gpu-memory-utilization where that is given.",
    ),
    Option(
        "reference_ops",
        (),
        names,
        "Operators that run as plain-PyTorch references although the device has a kernel; 'all' for every one. "
        "To find out whether a kernel is at fault.",
    ),
    Option(
        "numeric_guard",
        (),
        some_of("layers", "modules", "copies"),
        "Stops the engine at the first NaN or Inf that a decoder layer (layers) or any module (modules) puts out, and "
        "names it; checks copies between host and card (copies). Several with commas, or 'all'. docs/numeric-guard.md "
        "says what it costs and what it cannot see.",
    ),
    Option(
        "quantization_group",
        None,
        group_size,
        "Weights that share a scale with --quantization int8 or int4: a multiple of 8, or 0 for all of a row; default: "
        "the format's own. docs/quantization.md says what each costs.",
    ),
    Option(
        "weights_listen",
        None,
        loopback_text,
        "Where servers that are started later may load the weights from, such as 127.0.0.1:9100; each worker takes a "
        "port, from this one on. docs/weights-from-a-peer.md says how.",
    ),
    Option(
        "patch_drift",
        "error",
        one_of("error", "warn"),
        "What a patch means whose target in vLLM is not the source it was written against: stop, or warn and apply it. "
        "Patches come before --additional-config is read, so as a variable only.",
    ),
)


@dataclass(frozen=True, slots=True)
class Runtime:
    entries: Mapping[str, DeviceEntry]
    selection: Selection
    device: Device
    settings: Mapping[str, Mapping[str, Setting]]

    def setting(self, key: str) -> Any:
        return self.settings[""][key].value


def scopes(entries: Mapping[str, DeviceEntry]) -> Scopes:
    return {"": OPTIONS, **{name: entry.options() for name, entry in entries.items()}}


def _settings(entries: Mapping[str, DeviceEntry], section: Mapping[str, Any]) -> dict[str, dict[str, Setting]]:
    return resolve(scopes(entries), section, os.environ)


def _own(settings: Mapping[str, Mapping[str, Setting]], device: str) -> dict[str, Any]:
    return {key: setting.value for key, setting in settings[device].items()}


def choose(section: Mapping[str, Any] | None = None, name: str | None = None) -> Runtime:
    """Discover, settle options, choose: the device `name`, or the one asked for, or the best. Nothing is started.

    Raises a BackplaneError that says what to do.
    """
    entries = discover()
    early = _settings(entries, {})
    requested = early[""]["device"]
    selection = select(entries, name, "--device") if name else select(entries, requested.value, requested.source)
    settings = _settings(entries, section or {})
    _refuse_late(settings, early, selection)
    device = selection.entry.device_class()(_own(settings, selection.entry.name))
    return Runtime(entries, selection, device, settings)


def _refuse_late(
    settings: Mapping[str, Mapping[str, Setting]], early: Mapping[str, Mapping[str, Setting]], selection: Selection
) -> None:
    """What --additional-config alone says, and was needed before it is read."""
    if settings[""]["patch_drift"].value != early[""]["patch_drift"].value:
        raise OptionError(
            "patch_drift is needed before --additional-config is read; set the variable BACKPLANE_PATCH_DRIFT instead"
        )
    asked = settings[""]["device"]
    if asked.value is not None and asked.value != selection.entry.name and "additional" in asked.source:
        raise OptionError(
            f"--additional-config asks for device {asked.value!r}, but this process started on "
            f"{selection.entry.name!r} ({selection.reason}). vLLM reads that option after the platform is chosen: set "
            f"BACKPLANE_DEVICE={asked.value}, or use 'vllm-backplane serve --device {asked.value}'."
        )


@cache
def runtime() -> Runtime:
    """This process's device, ready for tensors."""
    chosen = choose()
    _refuse_settings(chosen.device)
    chosen.device.load()
    return chosen


def _refuse_settings(device: Device) -> None:
    for what, remedy in device.faulty_settings():
        raise OptionError(f"{what}; {remedy}")


def configured(additional_config: Any) -> Runtime:
    """`runtime()` with the options of a vLLM configuration added. The device stays the same object."""
    chosen = runtime()
    settings = _settings(chosen.entries, section_of(additional_config))
    _refuse_late(settings, chosen.settings, chosen.selection)
    chosen.device.settings = _own(settings, chosen.selection.entry.name)
    _refuse_settings(chosen.device)
    return replace(chosen, settings=settings)


def misplaced(additional_config: Mapping[str, Any]) -> str | None:
    """What stands beside Backplane's section and is meant for it: one that is almost called so, or an option."""
    own = {option.key for option in OPTIONS} | set(discover())
    for key in map(str, additional_config):
        if key == SECTION:
            continue
        if key in own:
            return (
                f"""--additional-config has {key!r} at its top; Backplane reads it in {{"{SECTION}": {{"{key}": …}}}}"""
            )
        if difflib.SequenceMatcher(a=key.lower(), b=SECTION).ratio() > 0.8:
            return f"--additional-config has a section {key!r}; did you mean {SECTION!r}?"
    return None


def section_of(additional_config: Any) -> Mapping[str, Any]:
    """Backplane's part of vLLM's --additional-config; a section that is almost called so is an error."""
    if not isinstance(additional_config, Mapping):
        return {}
    fault = misplaced(additional_config)
    if fault is not None:
        raise OptionError(fault)
    section = additional_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise OptionError(f"the section {SECTION!r} of --additional-config is {section!r}; give an object with options")
    return section
