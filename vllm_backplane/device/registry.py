"""Finds the installed devices, Backplane's own and those of other wheels, through one entry-point group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vllm_backplane.device.contract import Device, Probe
from vllm_backplane.errors import BackplaneError
from vllm_backplane.settings.options import DEVICE_GROUP, Option

ENTRY_POINT_GROUP = DEVICE_GROUP


@dataclass(frozen=True)
class DeviceEntry:
    """Describes a device that an installed distribution provides. Its module is imported at the first use."""

    name: str
    source: str
    """Name of the distribution."""
    entry_point: EntryPoint

    @cached_property
    def _loaded(self) -> type[Device] | BaseException:
        try:
            cls = self.entry_point.load()
            if not (isinstance(cls, type) and issubclass(cls, Device)):
                raise TypeError(f"{self.entry_point.value} is not a subclass of vllm_backplane.device.Device")
            for attribute in ("name", "torch_type", "dispatch_key"):
                if not isinstance(getattr(cls, attribute, None), str):
                    raise TypeError(f"{cls.__qualname__} does not define {attribute!r}")
            if cls.name != self.name:
                raise TypeError(f"entry point {self.name!r} loads a device whose name is {cls.name!r}")
            return cls
        except Exception as fault:  # a vendor's import may fail in any way; the probe reports it as its reason
            return fault

    def device_class(self) -> type[Device]:
        """Returns the class; raises a BackplaneError if its import failed."""
        if isinstance(self._loaded, BaseException):
            raise BackplaneError(
                f"device {self.name!r} of {self.source} cannot be imported: "
                f"{type(self._loaded).__name__}: {self._loaded}"
            ) from self._loaded
        return self._loaded

    def probe(self) -> Probe:
        """Returns the device's probe, or an unavailable one if its import failed or its probe raised."""
        if isinstance(self._loaded, BaseException):
            return Probe(
                available=False,
                reason=f"import failed: {type(self._loaded).__name__}: {self._loaded}",
                remedy=f"repair or reinstall {self.source}",
            )
        try:
            return self._loaded.probe()
        except Exception as fault:  # probe() must not raise; a device whose probe does is unavailable
            return Probe(
                available=False,
                reason=f"its probe raised {type(fault).__name__}: {fault}",
                remedy=f"report this to the maintainers of {self.source}",
            )

    def options(self) -> tuple[Option[Any], ...] | str:
        """Returns the device's options, or the reason why they are not known."""
        if isinstance(self._loaded, BaseException):
            probe = self.probe()
            return f"device {self.name!r} cannot be used: {probe.reason}; {probe.remedy}"
        return self._loaded.options


def discover() -> dict[str, DeviceEntry]:
    """Returns every installed device by name; raises a BackplaneError if two distributions provide the same name."""
    found: dict[str, DeviceEntry] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        source = point.dist.metadata["Name"] if point.dist else "an unknown distribution"
        entry = DeviceEntry(point.name, source, point)
        other = found.get(point.name)
        if other is not None and other.entry_point.value != point.value:
            raise BackplaneError(
                f"two distributions provide a device {point.name!r}: {other.source} and {source}; uninstall one"
            )
        found[point.name] = entry
    if not found:
        raise BackplaneError(
            f"no entry points in the group {ENTRY_POINT_GROUP!r}: vllm-backplane is on the path but not "
            "installed; run 'pip install .' in its folder"
        )
    return found
