"""Tests the bound of the work that a pattern of layer names takes, against the time that matchers really take."""

from __future__ import annotations

import pytest

from vllm_backplane.name_patterns import UnboundedPattern, ways


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("q_proj", 1),
        (r"^model\.layers\.\d\.self_attn$", 1),
        (r".*\.self_attn\..*", 66 * 65 / 2),  # the first ends at one of 65 places, and the second not before it
        (r"layers\.\d+\.(q|k|v)_proj", 65 * 3),
        (r"a|b|c", 3),
        (r"(a|b)(c|d|)", 6),
        (r"((a|b)|c)", 4),
        (r"colou?r(s)?", 4),
        (r"[a-z]{2,5}x{3}", 4),
        (r".*?x", 65),
        (r"(?!.*lm_head).*", 66 * 65 / 2),
        (r"[]*+?(]\*\(", 1),
    ],
)
def test_the_ways_of_a_pattern(pattern: str, expected: float) -> None:
    assert ways(pattern, 64) == expected


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*)*x", "(ab){3}", r"(a)\1", "(", ")", "a)(b", "[a", "*", "a**", "x" * 1001]
)
def test_what_has_no_bound_is_refused(pattern: str) -> None:
    with pytest.raises(UnboundedPattern):
        ways(pattern, 64)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(.|.)" * 39 + "Z", "(|.)" * 49 + "Z", ".?" * 40 + "Z", ".{0,99}" * 20, "(?:.|.)" * 40),
        *(".*" * 20 + "x", "a*" * 250 + "Z", "a*" * 499 + "Z", ".?" * 499),
    ],
    ids=len,
)
def test_patterns_that_take_hours_have_many_ways(pattern: str) -> None:
    assert ways(pattern, 64) > 1e10
