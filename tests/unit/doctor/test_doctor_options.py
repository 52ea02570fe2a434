"""`vllm-backplane doctor` reports settings that serving would refuse, with their remedy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.environment import AT_START
from vllm_backplane.doctor import devices, subprocess_checks
from vllm_backplane.doctor.findings import Finding


def findings(section: dict[str, Any] | None = None, **variables: str) -> tuple[Finding, ...]:
    plain = {name: value for name, value in AT_START.items() if not name.startswith("BACKPLANE_")}
    request = {"additional_config": {"backplane": section or {}}}
    results = subprocess_checks.run(devices.CHECKS, request, {**plain, "BACKPLANE_DEVICE": "sim", **variables})
    return devices.judge(results).findings


@pytest.mark.process
@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ("melt@launch=5", "'melt' is not a kind of fault"),
        ("lost@launch=5,card=2", "names card 2, and there are 2"),
    ],
)
def test_faults_that_serving_refuses(faults: str, text: str) -> None:
    [found] = findings(BACKPLANE_SIM_FAULTS=faults)
    assert found.severity == "error"
    assert text in found.what
    assert "correct or unset BACKPLANE_SIM_FAULTS" in found.remedy


@pytest.mark.process
@pytest.mark.parametrize(
    "refused",
    [
        {
            "BACKPLANE_SIM_MEMORY": ("1MiB", "expected 2MiB to 8TiB"),
            "BACKPLANE_SIM_MODEL": ("memory=inf", "expected memory=B/s"),
            "BACKPLANE_SIM_SYNC_TIMEOUT": ("4294968", "at most 4294967"),
            "BACKPLANE_SIM_THREADS": ("4294967297", "at most 4096"),
        },
        {
            "BACKPLANE_SIM_MEMORY": ("9TiB", "expected 2MiB to 8TiB"),
            "BACKPLANE_SIM_MODEL": ("memory=800e9,overhead=nan", "expected memory=B/s"),
        },
        {"BACKPLANE_SIM_MODEL": ("memory=1e9,link=1e9, memory=2e9", "expected memory only once")},
    ],
    ids=["one each", "others", "twice"],
)
def test_values_that_the_driver_refuses_or_would_misread(refused: dict[str, tuple[str, str]]) -> None:
    found = {one.remedy: one for one in findings(**{variable: value for variable, (value, _) in refused.items()})}
    assert set(found) == {f"correct or unset {variable}" for variable in refused}
    for variable, (_, text) in refused.items():
        assert found[f"correct or unset {variable}"].severity == "error"
        assert text in found[f"correct or unset {variable}"].what


@pytest.mark.process
@pytest.mark.parametrize(
    "taken",
    [
        {
            "BACKPLANE_SIM_MEMORY": "2MiB",
            "BACKPLANE_SIM_MODEL": "memory=800e9, overhead=0",
            "BACKPLANE_SIM_SYNC_TIMEOUT": "4294967",
        },
        {"BACKPLANE_SIM_MEMORY": "8TiB"},
    ],
    ids=["least", "most"],
)
def test_the_least_and_the_most_that_it_takes(taken: dict[str, str]) -> None:
    assert findings(**taken) == ()


@pytest.mark.process
def test_cards_by_the_wrong_way() -> None:
    [found] = findings({"sim": {"cards": 4}})
    assert found.severity == "error"
    assert "sim.cards is 4" in found.what
    assert found.remedy == "set BACKPLANE_SIM_CARDS instead"


@pytest.mark.process
def test_an_option_that_comes_too_late() -> None:
    [found] = findings({"patch_drift": "warn"})
    assert found.severity == "error"
    assert "BACKPLANE_PATCH_DRIFT" in found.what + found.remedy


@pytest.mark.process
def test_sound_settings() -> None:
    good = {"sim": {"faults": "fail@launch=250;lost@launch=400,card=1"}}
    assert findings(good, BACKPLANE_SIM_CARDS="2") == ()
