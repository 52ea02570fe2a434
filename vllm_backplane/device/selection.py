"""Selects the device to run on and records why it was selected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_backplane.device.contract import Probe
from vllm_backplane.device.registry import DeviceEntry
from vllm_backplane.errors import DeviceUnavailable, nearest


@dataclass(frozen=True, slots=True)
class Selection:
    """Records the selected device, its probe, and the reason for the selection."""

    entry: DeviceEntry
    probe: Probe
    reason: str


def select(entries: Mapping[str, DeviceEntry], requested: str | None, requested_by: str = "") -> Selection:
    """Returns the requested device, or the available one with the highest priority if none is requested.

    Raises DeviceUnavailable if the requested device cannot be used; it is never replaced by another.
    """
    if requested is not None:
        entry = entries.get(requested)
        if entry is None:
            raise DeviceUnavailable(
                f"{requested_by or 'the caller'} requests device {requested!r}, which no installed distribution "
                f"provides{nearest(requested, entries)} Installed: {', '.join(sorted(entries))}."
            )
        probe = entry.probe()
        if not probe.available:
            raise DeviceUnavailable(
                f"{requested_by or 'the caller'} requests device {requested!r}, which cannot be used: "
                f"{probe.reason}. Remedy: {probe.remedy or 'choose another device'}."
            )
        return Selection(entry, probe, f"requested by {requested_by or 'the caller'}")

    probes = {name: entry.probe() for name, entry in entries.items()}
    usable = [name for name, probe in probes.items() if probe.available]
    if not usable:
        why = "; ".join(f"{name}: {probe.reason}" for name, probe in sorted(probes.items()))
        raise DeviceUnavailable(
            f"no device can be used on this machine. {why}. Run 'vllm-backplane doctor', which names the remedies."
        )
    priorities = {name: entries[name].device_class().priority for name in usable}
    best = [name for name in usable if priorities[name] == max(priorities.values())]
    if len(best) > 1:
        raise DeviceUnavailable(
            f"devices {' and '.join(sorted(best))} have the same priority; choose one with BACKPLANE_DEVICE"
        )
    among = ", ".join(sorted(usable))
    reason = f"highest priority of the available devices ({among})" if len(usable) > 1 else "the only device available"
    # The reason lists unavailable devices too: a user must see that an installed accelerator is not used.
    skipped = [f"{name}: {probe.reason}" for name, probe in sorted(probes.items()) if not probe.available]
    if skipped:
        reason += f"; not available: {'; '.join(skipped)}"
    return Selection(entries[best[0]], probes[best[0]], reason)
