"""The device of this process, chosen once.

vLLM starts several processes, and each builds its platform by itself; all of them come here. What decides the
device is therefore only what every process sees: the environment and the installed distributions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm_backplane.device import Device, DeviceEntry, Selection, discover, select
from vllm_backplane.errors import OptionError
from vllm_backplane.options import Option, Setting, fraction, names, one_of, resolve, text

SECTION = "backplane"

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
        "patch_drift",
        "error",
        one_of("error", "warn"),
        "What a patch means whose target in vLLM is not the source it was written against: stop, or warn and apply it.",
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


def scopes(entries: Mapping[str, DeviceEntry]) -> dict[str, tuple[Option[Any], ...]]:
    return {"": OPTIONS, **{name: entry.options() for name, entry in entries.items()}}


def build(additional_config: Mapping[str, Any] | None = None) -> Runtime:
    """Discover, settle options, choose. Raises a BackplaneError that says what to do."""
    entries = discover()
    section = (additional_config or {}).get(SECTION, {})
    by_environment = resolve(scopes(entries), {}, os.environ)
    requested = by_environment[""]["device"]
    selection = select(entries, requested.value, requested.source)
    settings = resolve(scopes(entries), section, os.environ) if section else by_environment
    insisted = settings[""]["device"].value
    if insisted is not None and insisted != selection.entry.name:
        raise OptionError(
            f"--additional-config asks for device {insisted!r}, but this process started on "
            f"{selection.entry.name!r} ({selection.reason}). vLLM reads that option after the platform is chosen: "
            f"set BACKPLANE_DEVICE={insisted}, or use 'vllm-backplane serve --device {insisted}'."
        )
    own = {key: setting.value for key, setting in settings[selection.entry.name].items()}
    return Runtime(entries, selection, selection.entry.device_class()(own), settings)


@cache
def runtime() -> Runtime:
    """This process's device, ready for tensors."""
    chosen = build()
    chosen.device.load()
    return chosen


def configured(additional_config: Mapping[str, Any] | None) -> Runtime:
    """`runtime()` with the options of a vLLM configuration added, for a worker about to start."""
    chosen = build(additional_config)
    chosen.device.load()
    return chosen
