"""Tests that a step runs without an adapter that cannot be loaded, and that its output marks the failed requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_backplane.lora import prefetch, validation
from vllm_backplane.lora.http_errors import AdapterRefused
from vllm_backplane.lora.prefetch import AdapterPrefetcher
from vllm_backplane.lora.scheduler import _ATTRIBUTE
from vllm_backplane.worker.worker import BackplaneWorker

GOOD, BAD, OTHER = 1, 2, 3


class Runner:
    """Stands in for vLLM's runner, with adapters by number, least recently used first; some cannot be read."""

    capacity = 2

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.damaged = {BAD}
        self.pinned: set[int] = set()
        self.read: list[int] = []
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(
            req_id_to_index={}, request_lora_mapping=[], lora_id_to_request_ids={}, lora_id_to_lora_request={}
        )
        self.modules: dict[str, Any] = {}
        self.lora_config = SimpleNamespace(target_modules=None, max_lora_rank=8)

    def get_model(self) -> Any:
        return SimpleNamespace(lora_manager=self)

    def __len__(self) -> int:
        return len(self.held)

    def get_adapter(self, number: int) -> Any:
        return self.held.get(number)

    def list_loras(self) -> set[int]:
        return set(self.held)

    def remove_lora(self, number: int) -> None:
        del self.held[number]

    def remove_oldest_adapter(self) -> None:
        if self.pinned >= self.held.keys():
            raise RuntimeError("All items are pinned, cannot remove oldest from the cache.")
        del self.held[next(iter(self.held))]

    def add_lora(self, request: LoRARequest) -> bool:
        number = request.lora_int_id
        if number in self.held and not request.load_inplace:
            self.held[number] = self.held.pop(number)
            return False
        self.read.append(number)
        if number in self.damaged:
            raise ValueError("the header is cut off")
        self.held.pop(number, None)
        if len(self) + 1 > self.capacity:
            self.remove_oldest_adapter()
        self.held[number] = SimpleNamespace(loras={})
        return True


def adapter(number: int, **more: Any) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, "/nowhere", **more)


def step(new: dict[str, LoRARequest | None], cached: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, lora_request=one) for name, one in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached)),
    )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(validation, "gather_failure", lambda failure: failure)
    monkeypatch.setattr(validation, "_ranks", lambda request: (8,))
    monkeypatch.setattr(validation, "rank_mismatches", lambda path: ())
    return Runner()


@pytest.fixture
def prefetcher(runner: Runner) -> AdapterPrefetcher:
    parallel: Any = SimpleNamespace(world_size=1, pipeline_parallel_size=1)
    return AdapterPrefetcher(runner, parallel)


def failed_requests(prefetcher: AdapterPrefetcher) -> frozenset[str]:
    return getattr(prefetcher.mark_output(ModelRunnerOutput(req_ids=[], req_id_to_index={})), _ATTRIBUTE, frozenset())


def test_requests_with_a_damaged_adapter_fail_and_the_others_have_theirs(
    runner: Runner, prefetcher: AdapterPrefetcher
) -> None:
    taken = step({"a": adapter(GOOD), "b": adapter(BAD), "c": None, "d": adapter(BAD)})
    prefetcher.prepare(taken)
    given = {new.req_id: new.lora_request and new.lora_request.lora_int_id for new in taken.scheduled_new_reqs}
    assert given == {"a": GOOD, "b": None, "c": None, "d": None}
    assert prefetcher.mark_output(None) is None, "the output comes with the tokens"
    assert failed_requests(prefetcher) == {"b", "d"}
    assert runner.list_loras() == {GOOD}
    prefetcher.prepare(step({}))
    assert failed_requests(prefetcher) == frozenset()


def running(runner: Runner, **held: LoRARequest | None) -> None:
    """Puts requests into the batch of vLLM's V1 model runner."""
    batch = InputBatch.__new__(InputBatch)
    batch.req_id_to_index = {name: place for place, name in enumerate(held)}  # type: ignore[misc]
    batch.request_lora_mapping = np.array([one.lora_int_id if one else 0 for one in held.values()])
    batch.lora_id_to_lora_request = {one.lora_int_id: one for one in held.values() if one}
    batch.lora_id_to_request_ids = {
        number: {name for name, one in held.items() if one and one.lora_int_id == number}
        for number in batch.lora_id_to_lora_request
    }
    runner.input_batch = batch  # type: ignore[assignment]
    runner.requests = {name: SimpleNamespace(lora_request=one) for name, one in held.items()}


@pytest.mark.parametrize("pinned", [set(), {GOOD, OTHER}])
def test_a_request_that_runs_goes_on_without_it(
    runner: Runner, prefetcher: AdapterPrefetcher, pinned: set[int]
) -> None:
    running(runner, a=None, b=adapter(BAD), c=adapter(GOOD), d=adapter(BAD))
    runner.add_lora(adapter(GOOD))
    runner.add_lora(adapter(OTHER))
    runner.pinned = pinned
    prefetcher.prepare(step({"new": adapter(GOOD)}, ("a", "b", "c", "d")))
    assert runner.list_loras() == {GOOD, OTHER}, "no place is taken"
    assert list(runner.input_batch.request_lora_mapping) == [0, 0, GOOD, 0]
    assert runner.input_batch.lora_id_to_request_ids == {GOOD: {"c"}}
    assert list(runner.input_batch.lora_id_to_lora_request) == [GOOD]
    assert failed_requests(prefetcher) == {"b", "d"}


def test_with_the_v2_model_runner_as_well(runner: Runner, prefetcher: AdapterPrefetcher) -> None:
    second = LoraState(4)
    runner.lora_state, runner.req_states = second, SimpleNamespace(req_id_to_index={"a": 0, "b": 2})  # type: ignore[attr-defined]
    second.add_request("a", 0, adapter(GOOD))
    second.add_request("b", 2, adapter(BAD))
    prefetcher.prepare(step({}, ("a", "b")))
    assert (list(second.lora_ids), list(second.lora_requests)) == ([GOOD, 0, 0, 0], ["a"])
    assert failed_requests(prefetcher) == {"b"}


def test_one_that_cannot_be_replaced_serves_those_that_have_it(runner: Runner, prefetcher: AdapterPrefetcher) -> None:
    running(runner, old=adapter(GOOD))
    runner.add_lora(adapter(GOOD))
    runner.damaged = {GOOD}
    taken = step({"new": adapter(GOOD, load_inplace=True), "other": adapter(GOOD)}, ("old",))
    prefetcher.prepare(taken)
    assert [(new.lora_request.lora_int_id, new.lora_request.load_inplace) for new in taken.scheduled_new_reqs] == [
        (GOOD, False),
        (GOOD, False),
    ], "what is computed for the first may be found by others"
    assert failed_requests(prefetcher) == {"new"}
    assert runner.list_loras() == {GOOD}
    assert list(runner.input_batch.request_lora_mapping) == [GOOD]


def test_one_that_was_mended_and_loaded_is_served_at_once(runner: Runner, prefetcher: AdapterPrefetcher) -> None:
    prefetcher.prepare(step({"a": adapter(BAD)}))
    assert failed_requests(prefetcher) == {"a"}
    runner.damaged.clear()
    prefetcher.clear_failure(BAD)
    prefetcher.prepare(step({"b": adapter(BAD, load_inplace=True)}))
    assert failed_requests(prefetcher) == frozenset()


@pytest.fixture
def worker(runner: Runner, prefetcher: AdapterPrefetcher) -> BackplaneWorker:
    """Returns a worker that can load adapters, made without starting a process."""
    made = BackplaneWorker.__new__(BackplaneWorker)
    made.model_runner = runner  # type: ignore[assignment]
    made.adapter_prefetcher, made.parallel_config, made.rank = prefetcher, prefetcher._parallel, 0
    return made


def test_loading_one_that_was_mended_ends_the_wait(
    runner: Runner, prefetcher: AdapterPrefetcher, worker: BackplaneWorker
) -> None:
    """Removes the adapter again before it is used."""
    prefetcher.prepare(step({"a": adapter(BAD)}))
    assert failed_requests(prefetcher) == {"a"}
    runner.damaged.clear()
    assert worker.add_lora(adapter(BAD)) is True
    runner.remove_lora(BAD)
    prefetcher.prepare(step({"b": adapter(BAD)}))
    assert (failed_requests(prefetcher), runner.read) == (frozenset(), [BAD, BAD, BAD])


def test_loading_one_in_vain_does_not(runner: Runner, prefetcher: AdapterPrefetcher, worker: BackplaneWorker) -> None:
    prefetcher.prepare(step({"a": adapter(BAD)}))
    assert failed_requests(prefetcher) == {"a"}
    with pytest.raises(AdapterRefused, match="the header is cut off"):
        worker.add_lora(adapter(BAD))
    prefetcher.prepare(step({"b": adapter(BAD)}))
    assert (failed_requests(prefetcher), runner.read) == ({"b"}, [BAD, BAD])


def test_the_advice_is_given_once(runner: Runner, prefetcher: AdapterPrefetcher) -> None:
    runner.add_lora(adapter(GOOD))
    runner.add_lora(adapter(OTHER))
    runner.damaged, runner.pinned = set(), {GOOD, OTHER}
    for name in ("a", "b", "c"):
        prefetcher.prepare(step({name: adapter(BAD)}))
        assert prefetcher._step_failures[BAD].count(validation.UNPIN) == 1
        assert failed_requests(prefetcher) == {name}


def test_it_is_read_again_after_a_while(
    runner: Runner, prefetcher: AdapterPrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetcher.prepare(step({"a": adapter(BAD)}))
    assert failed_requests(prefetcher) == {"a"}
    runner.damaged.clear()
    prefetcher.prepare(step({"b": adapter(BAD)}))
    assert (failed_requests(prefetcher), runner.read) == ({"b"}, [BAD])
    monkeypatch.setattr(prefetch, "RETRY_SECONDS", 0.0)
    prefetcher.prepare(step({"c": adapter(BAD)}))
    assert (failed_requests(prefetcher), runner.read) == (frozenset(), [BAD, BAD])


def test_one_that_is_to_be_replaced_is_read_once(runner: Runner, prefetcher: AdapterPrefetcher) -> None:
    runner.add_lora(adapter(GOOD))
    taken = step({"a": adapter(GOOD, load_inplace=True)})
    prefetcher.prepare(taken)
    [new] = taken.scheduled_new_reqs
    assert (new.lora_request.lora_int_id, new.lora_request.load_inplace) == (GOOD, False)
    assert runner.read == [GOOD, GOOD]


def test_an_output_that_is_still_being_copied_is_noted_when_it_is_there(
    runner: Runner, prefetcher: AdapterPrefetcher
) -> None:
    class Copied(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})

        def get_kv_connector_output(self) -> None:
            """Returns None: vLLM 0.33 requires this method of every output."""

    prefetcher.prepare(step({"a": adapter(BAD)}))
    output = prefetcher.mark_output(Copied())
    assert isinstance(output, AsyncModelRunnerOutput)
    assert getattr(output.get_output(), _ATTRIBUTE) == {"a"}
