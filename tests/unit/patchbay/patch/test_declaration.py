"""Tests that a patch cannot be declared without its reason, its upstream link and its removal condition."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import Fingerprint, Patch, Process

GOOD: dict[str, Any] = {
    "target": "package.module:Class.method",
    "process": Process.ENGINE,
    "versions": ">=0.32,<0.33",
    "why": "w",
    "how": "h",
    "upstream": "https://example.org/1",
    "remove_when": "r",
    "fingerprints": {"0.32.0": "0123456789abcdef 0123 4567"},
}


@pytest.mark.parametrize("field", ["target", "versions", "why", "how", "upstream", "remove_when"])
@pytest.mark.parametrize("value", ["", "  ", None])
def test_an_empty_field_is_an_error(field: str, value: Any) -> None:
    with pytest.raises(PatchError, match=field):
        Patch(**{**GOOD, field: value})


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_an_error(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        Patch(**{key: value for key, value in GOOD.items() if key != field})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "no_colon"}, "package.module:Qualified.name"),
        ({"process": "worker"}, "Process.PLATFORM"),
        ({"versions": "about 0.32"}, "0.32"),
        ({"expires": "later"}, "later"),
        ({"upstream": "see the tracker"}, "neither a link"),
        ({"upstream": "none:"}, "neither a link"),
        ({"fingerprints": {}}, "fingerprints is empty"),
        ({"fingerprints": {"0.32.0": "xyz"}}, "not a fingerprint"),
        ({"fingerprints": {"newest": "0123456789abcdef"}}, "'newest' in fingerprints is not a version"),
        ({"expires": " "}, "expires is empty"),
        ({"tolerates_change": " "}, "tolerates_change is empty"),
        ({"versions": ">=0.33,<0.31"}, "no version satisfies '>=0.33,<0.31'"),
        ({"versions": ">0.32,<0.32"}, "no version satisfies"),
        ({"expires": "==0.32.1,<0.32"}, "no version satisfies"),
        ({"after": ""}, "after is empty"),
        ({"upstream": "https://"}, "neither a link"),
        ({"fixed_if": "vllm.core:f"}, "fixed_if is not a pair of texts"),
        ({"fixed_if": ("vllm.core:f", " ")}, "fixed_if is not a pair of texts"),
        ({"faulty_while": ("vllm.core:f", "a", "b")}, "faulty_while is not a pair of texts"),
        ({"faulty_while": ("vllm.core.f", "text")}, "package.module:Qualified.name"),
    ],
)
def test_a_field_that_makes_no_sense_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        Patch(**{**GOOD, **change})


@pytest.mark.parametrize(
    "versions", [">=0.32", "<0.33", "==0.32.*", "!=0.32.0", "~=0.32", ">=0.32,<0.33,!=0.32.0", ">0.32", "===0.32"]
)
def test_a_range_that_has_versions_is_none_of_these(versions: str) -> None:
    assert Patch(**{**GOOD, "versions": versions}).versions == versions


def test_a_replacement_is_given_once() -> None:
    patch = Patch(**GOOD).value("one", None, __name__)
    with pytest.raises(PatchError, match="one already has its replacement"):
        patch.value("two", 2, __name__)
    with pytest.raises(PatchError, match="one already has its replacement"):
        patch(lambda: 0)


def test_no_link_needs_a_reason() -> None:
    assert Patch(**{**GOOD, "upstream": "none: the code is ours to adapt"}).upstream.startswith("none:")


def test_fingerprints_survive_being_written_down() -> None:
    text = "0123456789abcdef 0123 4567"
    assert str(Fingerprint.parse(text)) == text
