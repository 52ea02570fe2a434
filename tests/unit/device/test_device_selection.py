"""Tests how devices are discovered and selected, with entry points like those of an installed wheel."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest

from vllm_backplane.device import (
    ENTRY_POINT_GROUP,
    Device,
    DeviceEntry,
    MemoryInfo,
    Probe,
    discover,
    select,
)
from vllm_backplane.errors import BackplaneError, DeviceUnavailable
from vllm_backplane.settings.options import Option, text


class _Base(Device):
    torch_type = "cpu"
    dispatch_key = "CPU"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(available=True, count=1)

    def memory(self, index: int = 0) -> MemoryInfo:
        return MemoryInfo(total=10, free=4)


class Slow(_Base):
    name = "slow"
    priority = 10


class Fast(_Base):
    name = "fast"
    priority = 20
    options = (Option("path", "", text, "A path."),)


class Absent(_Base):
    name = "absent"
    priority = 1000

    @classmethod
    def probe(cls) -> Probe:
        return Probe(available=False, reason="no card in any slot", remedy="insert one")


class Raising(_Base):
    name = "raising"
    priority = 1000

    @classmethod
    def probe(cls) -> Probe:
        raise OSError("driver speaks another version")


class Nameless(_Base):
    pass


class NotADevice:
    name = "notadevice"


def entry(name: str, target: str) -> DeviceEntry:
    point = EntryPoint(name, f"{__name__}:{target}", ENTRY_POINT_GROUP)
    return DeviceEntry(name, "some-wheel", point)


def entries(*names: str) -> dict[str, DeviceEntry]:
    return {name: entry(name, name.capitalize()) for name in names}


def test_the_highest_priority_wins_whatever_the_order():
    for order in (("slow", "fast"), ("fast", "slow")):
        chosen = select(entries(*order), None)
        assert chosen.entry.name == "fast"
        assert chosen.probe.count == 1
        assert "slow" in chosen.reason
        assert "fast" in chosen.reason


def test_what_is_not_available_is_passed_over_when_nothing_was_requested():
    chosen = select(entries("absent", "raising", "slow"), None)
    assert chosen.entry.name == "slow"
    assert "only" in chosen.reason


def test_a_request_beats_priority_and_its_source_is_named():
    chosen = select(entries("slow", "fast"), "slow", "BACKPLANE_DEVICE")
    assert chosen.entry.name == "slow"
    assert "BACKPLANE_DEVICE" in chosen.reason


def test_a_request_is_never_replaced_by_another_device():
    with pytest.raises(DeviceUnavailable) as fault:
        select(entries("absent", "fast"), "absent", "BACKPLANE_DEVICE")
    for part in ("BACKPLANE_DEVICE", "'absent'", "no card in any slot", "insert one"):
        assert part in str(fault.value)


def test_an_unknown_device_suggests_the_nearest_and_lists_the_offer():
    with pytest.raises(DeviceUnavailable) as fault:
        select(entries("slow", "fast"), "fest", "BACKPLANE_DEVICE")
    assert "did you mean 'fast'?" in str(fault.value)
    assert "fast, slow" in str(fault.value)


def test_when_none_can_be_used_every_reason_is_reported():
    with pytest.raises(DeviceUnavailable) as fault:
        select(entries("absent", "raising"), None)
    assert "absent: no card in any slot" in str(fault.value)
    assert "driver speaks another version" in str(fault.value)


def test_a_probe_that_raises_means_unavailable_with_the_cause():
    probe = entry("raising", "Raising").probe()
    assert not probe.available
    assert "OSError: driver speaks another version" in probe.reason
    assert "some-wheel" in probe.remedy


@pytest.mark.parametrize(
    ("name", "target", "cause"),
    [
        ("gone", "Gone", "AttributeError"),
        ("notadevice", "NotADevice", "not a subclass"),
        ("nameless", "Nameless", "does not define 'name'"),
        ("quick", "Fast", "whose name is 'fast'"),
    ],
)
def test_a_broken_entry_point_is_unavailable_with_a_reason(name, target, cause):
    broken = entry(name, target)
    probe = broken.probe()
    assert not probe.available
    assert cause in probe.reason
    assert "cannot be used: import failed" in str(broken.options())
    with pytest.raises(BackplaneError, match="cannot be imported"):
        broken.device_class()


def test_a_missing_module_is_a_reason_too():
    point = EntryPoint("vendor", "vendor_module_that_is_not_there:Device", ENTRY_POINT_GROUP)
    probe = DeviceEntry("vendor", "vendor-wheel", point).probe()
    assert "ModuleNotFoundError" in probe.reason
    assert "vendor-wheel" in probe.remedy


def test_options_are_the_classes_own_and_reach_the_device():
    assert [option.key for option in entry("fast", "Fast").options()] == ["path"]
    assert Fast().settings == {"path": ""}
    assert Fast({"path": "/x"}).settings == {"path": "/x"}


@pytest.mark.parametrize(("available", "count", "reason"), [(True, 0, ""), (False, 0, "")])
def test_an_incomplete_probe_cannot_be_made(available, count, reason):
    with pytest.raises(ValueError, match="device"):
        Probe(available=available, count=count, reason=reason)


def test_memory_in_use_is_what_is_not_free():
    assert MemoryInfo(total=10, free=4).used == 6


def install(folder, distribution: str, device: str, target: str) -> None:
    """Writes the metadata that pip leaves of a wheel with an entry point."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{device} = {target}\n")


def test_devices_of_other_wheels_are_found_next_to_ours(tmp_path, monkeypatch):
    install(tmp_path, "vendor-npu", "npu", "vendor_npu:Npu")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = discover()
    assert found["npu"].source == "vendor-npu"
    assert found["cpu"].source == "vllm-backplane"


def test_two_wheels_with_one_device_name_are_an_error(tmp_path, monkeypatch):
    install(tmp_path / "a", "vendor-a", "npu", "vendor_a:Npu")
    install(tmp_path / "b", "vendor-b", "npu", "vendor_b:Npu")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b"), *sys.path])
    with pytest.raises(BackplaneError, match="uninstall one") as fault:
        discover()
    assert "vendor-a" in str(fault.value)
    assert "vendor-b" in str(fault.value)


def test_without_any_entry_point_the_remedy_is_an_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not hasattr(f, "MAPPING")])
    with pytest.raises(BackplaneError, match="pip install"):
        discover()
