"""Tests that an adapter which cannot replace another one leaves that one loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.lora import validation
from vllm_backplane.lora.http_errors import AdapterRefused

NUMBER = 7


class Runner:
    """The parts of vLLM's runner that the validation uses: adapters by number."""

    def __init__(self, held: Any) -> None:
        self.held = {NUMBER: held} if held is not None else {}
        self.manager = SimpleNamespace(
            get_adapter=self.held.get, modules={}, lora_config=SimpleNamespace(max_lora_rank=8, target_modules=None)
        )

    def get_model(self) -> Any:
        return SimpleNamespace(lora_manager=self.manager)

    def remove_lora(self, number: int) -> None:
        del self.held[number]


def add(runner: Runner, load: Any) -> bool:
    request: Any = SimpleNamespace(lora_int_id=NUMBER, lora_name="mine", lora_path="nowhere")
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
