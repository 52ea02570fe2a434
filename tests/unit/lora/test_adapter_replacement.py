"""Tests that an adapter which cannot replace another one leaves that one loaded, and that files are checked before."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest

from vllm_backplane.lora import validation
from vllm_backplane.lora.http_errors import AdapterRefused

NUMBER = 7


class Runner:
    """Stands in for the parts of vLLM's runner that the validation uses: adapters by number."""

    def __init__(self, held: Any) -> None:
        self.held = {NUMBER: held} if held is not None else {}
        self.manager = SimpleNamespace(
            get_adapter=self.held.get, modules={}, lora_config=SimpleNamespace(max_lora_rank=8, target_modules=None)
        )

    def get_model(self) -> Any:
        return SimpleNamespace(lora_manager=self.manager)

    def remove_lora(self, number: int) -> None:
        del self.held[number]


def add(runner: Runner, load: Any, path: str = "/nowhere", reload: bool = False) -> bool:
    request = LoRARequest("mine", NUMBER, path, load_inplace=reload)
    parallel: Any = SimpleNamespace(world_size=1, pipeline_parallel_size=1)
    return validation.add_validated(runner, request, parallel, 0, load)


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "gather_failure", lambda failure: failure)


def failing(error: Exception) -> Any:
    def load(request: Any) -> bool:
        raise error

    return load


def test_the_one_before_stays_where_the_new_one_cannot_be_read() -> None:
    runner = Runner("the one before")
    with pytest.raises(AdapterRefused, match="the header is cut off"):
        add(runner, failing(ValueError("the header is cut off")))
    assert runner.held == {NUMBER: "the one before"}


def test_one_that_is_there_already_is_not_judged_again() -> None:
    runner = Runner("the one before")
    assert add(runner, lambda request: False) is False
    assert runner.held == {NUMBER: "the one before"}


def test_a_cache_of_pinned_adapters_is_no_fault_of_the_new_one() -> None:
    with pytest.raises(RuntimeError, match=r"pinned, .* unload a pinned adapter, or raise --max-cpu-loras") as raised:
        add(Runner(None), failing(RuntimeError("All items are pinned, cannot remove oldest from the cache.")))
    assert not isinstance(raised.value, AdapterRefused)


def test_one_that_cannot_be_judged_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(None)

    def load(request: Any) -> bool:
        runner.held[NUMBER] = SimpleNamespace(loras={})
        return True

    monkeypatch.setattr(validation, "_ranks", failing(OSError("the description is gone")))
    with pytest.raises(RuntimeError, match="the description is gone"):
        add(runner, load)
    assert runner.held == {}


def unread(request: LoRARequest) -> bool:
    raise AssertionError("the files of the adapter must not be read")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder that a download of organization/adapter gives. Other names are not on the hub."""

    def snapshot_download(repo_id: str) -> str:
        if repo_id != "organization/adapter":
            raise LocalEntryNotFoundError("the hub cannot be reached")
        return str(tmp_path)

    monkeypatch.setattr("vllm.lora.utils.hf_api", lambda: SimpleNamespace(snapshot_download=snapshot_download))
    return tmp_path


def test_the_files_of_a_downloaded_adapter_are_checked(hub: Path) -> None:
    os.mkfifo(hub / "adapter_config.json")
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json is not a regular file"):
        add(Runner(None), unread, "organization/adapter")
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json is not a regular file"):
        add(Runner("the one before"), unread, "organization/adapter", reload=True)


def test_an_adapter_that_cannot_be_downloaded_is_not_found(hub: Path) -> None:
    with pytest.raises(LoRAAdapterNotFoundError, match="organization/unknown"):
        add(Runner(None), unread, "organization/unknown")


def test_an_adapter_that_is_loaded_is_not_downloaded_again(hub: Path) -> None:
    assert add(Runner("the one before"), lambda request: False, "organization/unknown") is False
