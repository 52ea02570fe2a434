"""The set-up leaves out bounds of vLLM's requirements that the package index cannot meet, and nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from vllm_backplane.doctor import software

SCRIPT: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[2] / "scripts" / "install_requirements_of_vllm.py"), run_name="script"
)
DECLARED = [
    "Certifi>=2030.1", "fastapi[standard]<9,>=0.1", "numpy", "old==1; python_version < '3'", "extra-only; extra == 'x'",
]  # fmt: skip


def fake_pip(missing: dict[str, str], calls: list[list[str]]) -> Any:
    def pip(requirements: list[str]) -> tuple[int, str]:
        calls.append(requirements)
        for requirement in requirements:
            if requirement in missing:
                return 1, f"Collecting x\nERROR: No matching distribution found for {missing[requirement]}\n"
        return 0, "done"

    return pip


def install(missing: dict[str, str]) -> tuple[int, list[str], list[list[str]]]:
    calls: list[list[str]] = []
    status, unmet = SCRIPT["install"](fake_pip(missing, calls), SCRIPT["required"](DECLARED), ["torch==2.13.0"])
    return status, [each.name for each in unmet], calls


def test_everything_is_there() -> None:
    wanted = ["Certifi>=2030.1", "fastapi[standard]<9,>=0.1", "numpy", "torch==2.13.0"]
    assert install({}) == (0, [], [wanted])


def test_an_unmet_bound_is_left_out_and_reported() -> None:
    status, unmet, calls = install(
        {"Certifi>=2030.1": "certifi>=2030.1", "fastapi[standard]<9,>=0.1": "fastapi<9,>=0.1 (from x)"}
    )
    assert (status, unmet) == (0, ["Certifi", "fastapi"])
    assert calls[-1] == ["Certifi", "fastapi[standard]<9", "numpy", "torch==2.13.0"]


def test_exact_versions_are_left_out_and_upper_bounds_are_kept() -> None:
    loosened = SCRIPT["_loosened"]
    found = {each: str(loosened(Requirement(f"x{each}"))) for each in ("==1.2", "~=2.4.1", ">=1,<3", "!=2", ">1")}
    assert found == {"==1.2": "", "~=2.4.1": "==2.4.*", ">=1,<3": "<3", "!=2": "!=2", ">1": ""}


def test_other_failures_end_it() -> None:
    assert install({"torch==2.13.0": "torch==2.13.0"})[:2] == (1, [])  # not a requirement of vLLM
    assert install({"numpy": "numpy"})[:2] == (1, [])  # there is none at all
    assert install({"Certifi>=2030.1": "certifi>=2030.1", "Certifi": "certifi"})[:2] == (1, ["Certifi"])


def test_doctor_reports_what_is_unmet() -> None:
    [found] = software.check_requirements_of_vllm(
        "vllm", ["packaging>=9999", "numpy", "no-such-package-here>1", "x; extra == 'y'"]
    )
    assert found.severity == "warning"
    assert "packaging>=9999 (installed: " in found.what and "no-such-package-here>1 (installed: none)" in found.what
    assert "numpy" not in found.what
    assert software.check_requirements_of_vllm("vllm", ["numpy"]) == []
    assert software.check_requirements_of_vllm("no-such-distribution") == []
