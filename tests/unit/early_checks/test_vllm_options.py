"""The tables of vLLM's options serve to refuse what vLLM refuses, and nothing that it accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_lines import ACCEPTED, REFUSED

from vllm_backplane.early_checks import all_checks
from vllm_backplane.early_checks.vllm_options import VllmOption, VllmOptions, data_file
from vllm_backplane.errors import UsageError
from vllm_backplane.settings.releases import RELEASES
from vllm_patchbay.upstream import installed_version

SERIES = [release.series for release in RELEASES]


@pytest.fixture(scope="module")
def installed() -> VllmOptions:
    found = VllmOptions.of_release(installed_version().release[:2], all_checks.OWN_OPTIONS)
    assert found is not None
    return found


@pytest.mark.parametrize("arguments", ACCEPTED, ids=" ".join)
def test_what_vllm_accepts_is_accepted(installed: VllmOptions, arguments: tuple[str, ...]) -> None:
    installed.check(arguments)


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_vllm_refuses_is_refused_in_one_line(installed: VllmOptions, arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as refusal:
        installed.check(arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("series", SERIES, ids=str)
def test_every_supported_release_has_a_table(series: tuple[int, ...]) -> None:
    options = json.loads(data_file(series).read_text())
    names = [name for option in options for name in option["names"]]
    assert len(names) == len(set(names)) > 250
    found = VllmOptions.of_release(series, all_checks.OWN_OPTIONS)
    assert found is not None
    found.check(["--max-model-len", "2k", "-tp", "2", "--no-enable-prefix-caching", "--served-model-name", "a", "b"])
    found.check(["--moe-backend", "Flashinfer-Cutlass", "--max-loras", "0", "--mm-processor-cache-gb", "-1"])
    with pytest.raises(UsageError, match=r"unknown option --max-model-length; did you mean --max-model-len\?"):
        found.check(["--max-model-length", "8"])


def test_a_release_without_a_table_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VllmOptions.of_release((0, 99)) is None
    assert {path.name for path in Path(all_checks.__file__).parent.glob("*.json")} == {
        data_file(series).name for series in SERIES
    }


def test_the_options_of_other_plugins_are_left_to_vllm() -> None:
    found = VllmOptions.of_release(SERIES[-1], all_checks.OWN_OPTIONS, may_have_more=True)
    assert found is not None
    found.check(["--new-option", "1", "--convert", "newly", "-cc.new_key", "1"])
    with pytest.raises(UsageError, match="not a whole number"):
        found.check(["-tp", "two"])


def test_values_are_found_by_the_name_of_their_option(installed: VllmOptions) -> None:
    given = installed.check(["--load_format=dummy", "--headless", "--no-enforce-eager", "-tp", "2"])
    names = ("--load-format", "--headless", "--enforce-eager", "--tensor-parallel-size", "--uds")
    assert [given.get(name) for name in names] == ["dummy", True, False, "2", None]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (VllmOption(("-x",), kind="int", least=1), "0", "at least 1"),
        (VllmOption(("-x",), kind="float", above=0, most=1), "0", "more than 0"),
        (VllmOption(("-x",), kind="float", below=1), "1", "less than 1"),
        (VllmOption(("-x",), kind="size or auto", least=-1), "-5", "at least -1"),
        (VllmOption(("-x",), kind="optional int"), "none", "not a whole number"),
        (VllmOption(("-x",), kind="config"), "[1]", "not a JSON object"),
        (VllmOption(("-x",), kind="json"), "[" * 100_000, "nested too deeply"),
        (VllmOption(("-x",), choices=("a", "b")), "c", "They are: a, b"),
        (VllmOption(("-x",), choices=("a", "b", None)), "none", "They are: a, b"),
    ],
)
def test_a_value_is_refused(option: VllmOption, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        VllmOptions([option]).check(["-x", value])
    for allowed in ("", "None") if option.kind.startswith("optional") or None in option.choices else ():
        VllmOptions([option]).check(["-x", allowed])
