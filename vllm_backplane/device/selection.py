"""Chooses the device, and can say why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_backplane.device.contract import Probe
from vllm_backplane.device.registry import DeviceEntry
from vllm_backplane.errors import DeviceUnavailable, nearest


@dataclass(frozen=True, slots=True)
class Selection:
    entry: DeviceEntry
    probe: Probe
    reason: str


def select(entries: Mapping[str, DeviceEntry], requested: str | None, requested_by: str = "") -> Selection:
    """The requested device, or the best that is available. Raises DeviceUnavailable, never substitutes."""
    if requested is not None:
        entry = entries.get(requested)
        if entry is None:
            raise DeviceUnavailable(
                f"{requested_by or 'the caller'} asks for device {requested!r}, which no installed distribution "
                f"offers{nearest(requested, entries)} Offered: {', '.join(sorted(entries))}."
            )
        probe = entry.probe()
        if not probe.available:
            raise DeviceUnavailable(
                f"{requested_by or 'the caller'} asks for device {requested!r}, which cannot be used: "
                f"{probe.reason}. Remedy: {probe.remedy or 'choose another device'}."
            )
        return Selection(entry, probe, f"asked for by {requested_by or 'the caller'}")

    probes = {name: entry.probe() for name, entry in entries.items()}
    usable = [name for name, probe in probes.items() if probe.available]
    if not usable:
        why = "; ".join(f"{name}: {probe.reason}" for name, probe in sorted(probes.items()))
        raise DeviceUnavailable(f"no device can be used on this machine. {why}.")
    priorities = {name: entries[name].device_class().priority for name in usable}
    best = [name for name in usable if priorities[name] == max(priorities.values())]
    if len(best) > 1:
        raise DeviceUnavailable(
            f"devices {' and '.join(sorted(best))} have the same priority; choose one with BACKPLANE_DEVICE"
        )
    among = ", ".join(sorted(usable))
    reason = f"highest priority of the available devices ({among})" if len(usable) > 1 else "the only device available"
    # A device that was passed over must not pass unnoticed: acceleration would be off without a word.
    passed = [f"{name}: {probe.reason}" for name, probe in sorted(probes.items()) if not probe.available]
    if passed:
        reason += f"; passed over: {'; '.join(passed)}"
    return Selection(entries[best[0]], probes[best[0]], reason)
