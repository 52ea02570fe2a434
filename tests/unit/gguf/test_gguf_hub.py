"""Names of GGUF repositories of the hub are refused with the commands that download; all other names pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.hub import http_library, refuse_repository

FORMS = [f"m-{form}.gguf" for form in ("Q2_K", "Q4_0", "Q4_K_M", "Q6_K", "Q8_0")]
REPOSITORIES = {
    "org/m-GGUF": ["README.md", "config.json", *FORMS],
    "org/gguf-and-more": ["config.json", "model.safetensors", "m.gguf"],
    "org/gguf-tools": ["README.md"],
    "org/gguf-in-parts": ["mmproj-f16.gguf", "q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf"],
}


@pytest.fixture(autouse=True)
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the repositories whose files are requested from the hub."""
    names: list[str] = []

    def listed(_self: Any, name: str, **_options: Any) -> list[str]:
        names.append(name)
        if name not in REPOSITORIES:
            raise OSError("no such repository")
        return REPOSITORIES[name]

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", listed)
    return names


def test_a_repository_of_gguf_files_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"m-Q2_K.*and 1 more.*serve org/m-GGUF:m-Q2_K\.gguf'"):
        refuse_repository("org/m-GGUF")


def test_parts_are_fetched_together_and_projectors_are_no_models() -> None:
    with pytest.raises(
        CheckpointError, match=r"\('q/m-00001-of-00002\.gguf'\).*add org/gguf-in-parts:q/m-00001-of-00002\.gguf'"
    ):
        refuse_repository("org/gguf-in-parts")


def test_a_form_after_the_name_is_refused_without_asking(lookups: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"'org/m-GGUF:Q4_K_M' .*vllm-backplane serve org/m-GGUF:Q4_K_M'"):
        refuse_repository("org/m-GGUF:Q4_K_M")
    assert lookups == []


@pytest.mark.parametrize("name", ["org/gguf-and-more", "org/gguf-tools", "org/gguf-that-cannot-be-listed"])
def test_what_has_other_weights_or_is_not_known_is_left_to_vllm(lookups: list[str], name: str) -> None:
    refuse_repository(name)
    assert lookups == [name]


def test_nothing_is_looked_up_for_other_names_and_paths(lookups: list[str], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    elsewhere = ("s3://bucket/m-gguf", "gs://bucket/m-gguf/", "/models/missing.gguf", "models/in/gguf:more")
    for name in ("org/model", "smollm2", str(tmp_path / "m.gguf"), *elsewhere):
        refuse_repository(name)
    assert lookups == []


def test_without_a_network_the_name_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library for HTTP differs between releases of huggingface_hub, and so do its exceptions."""
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def unreachable(*_arguments: Any, **_options: Any) -> None:
        raise http_library().ConnectError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", unreachable)
    refuse_repository("org/m-GGUF")
