"""Tests where the values of options come from, and that every wrong key or value is an error."""

from __future__ import annotations

import pytest

from vllm_backplane.errors import OptionError
from vllm_backplane.settings.options import (
    OTHER_VARIABLES,
    Option,
    boolean,
    fraction,
    group_size,
    integer,
    names,
    one_of,
    resolve,
    some_of,
    text,
)

DEVICE = Option("device", None, text, "The device.")
SHARE = Option("memory_share", 0.5, fraction, "The share.")
THREADS = Option("threads", 0, integer(0, 64), "The threads.")
MODE = Option("bind-mode", "near", one_of("near", "spread"), "The binding.")
SCOPES = {"": (DEVICE, SHARE), "cpu": (THREADS, MODE), "sim": (THREADS,), "bare": ()}


@pytest.mark.parametrize(("given", "environment"), [({"acme": {"x": 1}}, {}), ({}, {"BACKPLANE_ACME_X": "1"})])
def test_an_option_of_a_device_that_cannot_be_imported_names_the_reason(given, environment):
    scopes = {**SCOPES, "acme": "device 'acme' cannot be used: libacme.so is missing"}
    with pytest.raises(OptionError, match=r"acme.*libacme\.so is missing"):
        resolve(scopes, given, environment)
    assert "acme" not in resolve(scopes, {}, {"BACKPLANE_SIM_THREADS": "5"})


def test_without_anything_given_defaults_apply_and_are_named_as_source():
    settled = resolve(SCOPES, {}, {})
    assert settled[""]["memory_share"].value == 0.5
    assert settled["cpu"]["bind-mode"].value == "near"
    assert {setting.source for scope in settled.values() for setting in scope.values()} == {"default"}


def test_a_scope_keeps_its_options_to_itself():
    settled = resolve(SCOPES, {"cpu": {"threads": 3}}, {"BACKPLANE_SIM_THREADS": "5"})
    assert settled["cpu"]["threads"].value == 3
    assert settled["sim"]["threads"].value == 5
    assert settled["cpu"]["threads"].source == "--additional-config backplane.cpu.threads"
    assert settled["sim"]["threads"].source == "BACKPLANE_SIM_THREADS"
    assert settled["cpu"]["threads"].path == "cpu.threads"
    assert settled[""]["device"].path == "device"


def test_hyphens_become_underscores_in_variables():
    assert MODE.variable("cpu") == "BACKPLANE_CPU_BIND_MODE"
    assert SHARE.variable() == "BACKPLANE_MEMORY_SHARE"
    assert resolve(SCOPES, {}, {"BACKPLANE_CPU_BIND_MODE": "spread"})["cpu"]["bind-mode"].value == "spread"


@pytest.mark.parametrize(
    ("given", "environment", "hint"),
    [
        ({"devise": "cpu"}, {}, "'device'"),
        ({"memory_shares": 1}, {}, "'memory_share'"),
        ({"cpu": {"thread": 1}}, {}, "'threads'"),
        ({}, {"BACKPLANE_DEVISE": "cpu"}, "'BACKPLANE_DEVICE'"),
        ({}, {"BACKPLANE_CPU_THREAD": "1"}, "'BACKPLANE_CPU_THREADS'"),
        ({}, {"BACKPLANE_CASH": "/x"}, "'BACKPLANE_CACHE'"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(given, environment, hint):
    with pytest.raises(OptionError, match="unknown") as fault:
        resolve(SCOPES, given, environment)
    assert f"did you mean {hint}?" in str(fault.value)


def test_an_unknown_key_like_no_other_lists_what_there_is():
    with pytest.raises(OptionError) as fault:
        resolve(SCOPES, {"zzzzzz": 1}, {})
    assert "did you mean" not in str(fault.value)
    for known in ("device", "memory_share", "cpu", "sim"):
        assert known in str(fault.value)


def test_a_device_without_options_refuses_every_key():
    with pytest.raises(OptionError, match=r"bare\.threads"):
        resolve(SCOPES, {"bare": {"threads": 1}}, {})


def test_variables_of_others_are_left_alone():
    resolve(SCOPES, {}, {"HOME": "/root", "VLLM_PLUGINS": "backplane", **dict.fromkeys(OTHER_VARIABLES, "1")})


@pytest.mark.parametrize(
    ("given", "environment", "named"),
    [
        ({"memory_share": 0}, {}, "--additional-config backplane.memory_share"),
        ({"memory_share": True}, {}, "--additional-config backplane.memory_share"),
        ({}, {"BACKPLANE_MEMORY_SHARE": "1.5"}, "BACKPLANE_MEMORY_SHARE"),
        ({}, {"BACKPLANE_MEMORY_SHARE": "half"}, "BACKPLANE_MEMORY_SHARE"),
        ({"cpu": {"threads": -1}}, {}, "cpu.threads"),
        ({"cpu": {"threads": 65}}, {}, "cpu.threads"),
        ({"cpu": {"threads": 2.0}}, {}, "cpu.threads"),
        ({"cpu": {"threads": None}}, {}, "cpu.threads"),
        ({"cpu": {"bind-mode": "far"}}, {}, "near, spread"),
        ({"device": ""}, {}, "backplane.device"),
    ],
)
def test_a_bad_value_is_refused_and_its_place_named(given, environment, named):
    with pytest.raises(OptionError, match="expected") as fault:
        resolve(SCOPES, given, environment)
    assert named in str(fault.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "must be an object"), ("cpu", "must be an object"), ({"cpu": 2}, "must be an object")],
)
def test_a_section_that_is_not_an_object_is_refused(given, message):
    with pytest.raises(OptionError, match=message):
        resolve(SCOPES, given, {})


def test_two_places_that_differ_are_an_error_that_names_both():
    with pytest.raises(OptionError, match="remove one") as fault:
        resolve(SCOPES, {"cpu": {"threads": 2}}, {"BACKPLANE_CPU_THREADS": "3"})
    assert "BACKPLANE_CPU_THREADS is 3" in str(fault.value)
    assert "backplane.cpu.threads is 2" in str(fault.value)


def test_two_places_that_agree_are_fine():
    setting = resolve(SCOPES, {"cpu": {"threads": 2}}, {"BACKPLANE_CPU_THREADS": "2"})["cpu"]["threads"]
    assert setting.value == 2
    assert "BACKPLANE_CPU_THREADS" in setting.source
    assert "--additional-config" in setting.source


def test_an_empty_variable_counts_as_not_set():
    assert resolve(SCOPES, {}, {"BACKPLANE_CPU_THREADS": ""})["cpu"]["threads"].source == "default"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("1", True), ("TRUE", True), ("on", True), (True, True), ("0", False), ("no", False), (False, False)],
)
def test_booleans(raw, expected):
    assert boolean(raw) is expected


@pytest.mark.parametrize("raw", ["maybe", "", None, 2])
def test_what_is_no_boolean(raw):
    with pytest.raises(ValueError, match="true or false"):
        boolean(raw)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("off", ()), ("", ()), ([], ()), ("all", ("a", "b", "c")), ("c,a", ("a", "c")), (["b"], ("b",))],
)
def test_some_of_several(raw, expected):
    assert some_of("a", "b", "c")(raw) == expected


@pytest.mark.parametrize("raw", ["d", "a,d", "off,a", "all,a", 1, True, None])
def test_what_is_none_of_several(raw):
    with pytest.raises(ValueError, match="off, all, or any of a, b, c, separated by commas"):
        some_of("a", "b", "c")(raw)


def test_names_come_as_a_list_or_with_commas():
    assert names(["rms_norm", "silu"]) == names("rms_norm, silu,") == ("rms_norm", "silu")
    for bad in (3, [1], {"a": 1}):
        with pytest.raises(ValueError, match="names"):
            names(bad)


def test_group_sizes_are_multiples_of_eight():
    assert [group_size(value) for value in ("0", 32, "128")] == [0, 32, 128]
    for wrong in (12, -8, "row", 8.0, True):
        with pytest.raises(ValueError, match=r"whole number|multiple of 8"):
            group_size(wrong)
