"""A step whose adapter cannot be loaded goes on without it, and says which requests must not be answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_backplane.lora import adapters
from vllm_backplane.lora import prefetch as step_adapters
from vllm_backplane.lora.http_errors import AdapterRefused
from vllm_backplane.lora.prefetch import StepAdapters
from vllm_backplane.lora.scheduler import _NOTE
from vllm_backplane.worker.worker import BackplaneWorker

GOOD, BAD, OTHER = 1, 2, 3


class Runner:
    """As much of vLLM's runner as is asked: adapters by number, the one used last at the end; some cannot be read."""

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
        self.lora_config = SimpleNamespace(target_modules=None)

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
    return LoRARequest(f"adapter {number}", number, "nowhere", **more)


def step(new: dict[str, LoRARequest | None], cached: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, lora_request=one) for name, one in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached)),
    )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(adapters, "agree", lambda failure: failure)
    monkeypatch.setattr(adapters, "_rank", lambda request: None)
    return Runner()


@pytest.fixture
def kept(runner: Runner) -> StepAdapters:
    parallel: Any = SimpleNamespace(world_size=1, pipeline_parallel_size=1)
    return StepAdapters(runner, parallel)


def unserved(kept: StepAdapters) -> frozenset[str]:
    return getattr(kept.tell(ModelRunnerOutput(req_ids=[], req_id_to_index={})), _NOTE, frozenset())


def test_requests_with_a_damaged_adapter_are_told_and_the_others_have_theirs(
    runner: Runner, kept: StepAdapters
) -> None:
    taken = step({"a": adapter(GOOD), "b": adapter(BAD), "c": None, "d": adapter(BAD)})
    kept.prepare(taken)
    given = {new.req_id: new.lora_request and new.lora_request.lora_int_id for new in taken.scheduled_new_reqs}
    assert given == {"a": GOOD, "b": None, "c": None, "d": None}
    assert kept.tell(None) is None, "the output comes with the tokens"
    assert unserved(kept) == {"b", "d"}
    assert runner.list_loras() == {GOOD}
    kept.prepare(step({}))
    assert unserved(kept) == frozenset()


def running(runner: Runner, **held: LoRARequest | None) -> None:
    """Requests in the batch of vLLM's first runner."""
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
def test_a_request_that_runs_goes_on_without_it(runner: Runner, kept: StepAdapters, pinned: set[int]) -> None:
    running(runner, a=None, b=adapter(BAD), c=adapter(GOOD), d=adapter(BAD))
    runner.add_lora(adapter(GOOD))
    runner.add_lora(adapter(OTHER))
    runner.pinned = pinned
    kept.prepare(step({"new": adapter(GOOD)}, ("a", "b", "c", "d")))
    assert runner.list_loras() == {GOOD, OTHER}, "no place is taken"
    assert list(runner.input_batch.request_lora_mapping) == [0, 0, GOOD, 0]
    assert runner.input_batch.lora_id_to_request_ids == {GOOD: {"c"}}
    assert list(runner.input_batch.lora_id_to_lora_request) == [GOOD]
    assert unserved(kept) == {"b", "d"}


def test_with_vllms_second_runner_as_well(runner: Runner, kept: StepAdapters) -> None:
    second = LoraState(4)
    runner.lora_state, runner.req_states = second, SimpleNamespace(req_id_to_index={"a": 0, "b": 2})  # type: ignore[attr-defined]
    second.add_request("a", 0, adapter(GOOD))
    second.add_request("b", 2, adapter(BAD))
    kept.prepare(step({}, ("a", "b")))
    assert (list(second.lora_ids), list(second.lora_requests)) == ([GOOD, 0, 0, 0], ["a"])
    assert unserved(kept) == {"b"}


def test_one_that_cannot_be_replaced_serves_those_that_have_it(runner: Runner, kept: StepAdapters) -> None:
    running(runner, old=adapter(GOOD))
    runner.add_lora(adapter(GOOD))
    runner.damaged = {GOOD}
    taken = step({"new": adapter(GOOD, load_inplace=True), "other": adapter(GOOD)}, ("old",))
    kept.prepare(taken)
    assert [(new.lora_request.lora_int_id, new.lora_request.load_inplace) for new in taken.scheduled_new_reqs] == [
        (GOOD, False),
        (GOOD, False),
    ], "what is computed for the first may be found by others"
    assert unserved(kept) == {"new"}
    assert runner.list_loras() == {GOOD}
    assert list(runner.input_batch.request_lora_mapping) == [GOOD]


def test_one_that_was_mended_and_loaded_is_served_at_once(runner: Runner, kept: StepAdapters) -> None:
    kept.prepare(step({"a": adapter(BAD)}))
    assert unserved(kept) == {"a"}
    runner.damaged.clear()
    kept.loaded(BAD)
    kept.prepare(step({"b": adapter(BAD, load_inplace=True)}))
    assert unserved(kept) == frozenset()


@pytest.fixture
def worker(runner: Runner, kept: StepAdapters) -> BackplaneWorker:
    """What loads adapters; what starts a process is left out."""
    made = BackplaneWorker.__new__(BackplaneWorker)
    made.model_runner = runner  # type: ignore[assignment]
    made.step_adapters, made.parallel_config, made.rank = kept, kept._parallel, 0
    return made


def test_loading_one_that_was_mended_ends_the_wait(runner: Runner, kept: StepAdapters, worker: BackplaneWorker) -> None:
    """Also where it is pushed out before it is used."""
    kept.prepare(step({"a": adapter(BAD)}))
    assert unserved(kept) == {"a"}
    runner.damaged.clear()
    assert worker.add_lora(adapter(BAD)) is True
    runner.remove_lora(BAD)
    kept.prepare(step({"b": adapter(BAD)}))
    assert (unserved(kept), runner.read) == (frozenset(), [BAD, BAD, BAD])


def test_loading_one_in_vain_does_not(runner: Runner, kept: StepAdapters, worker: BackplaneWorker) -> None:
    kept.prepare(step({"a": adapter(BAD)}))
    assert unserved(kept) == {"a"}
    with pytest.raises(AdapterRefused, match="the header is cut off"):
        worker.add_lora(adapter(BAD))
    kept.prepare(step({"b": adapter(BAD)}))
    assert (unserved(kept), runner.read) == ({"b"}, [BAD, BAD])


def test_the_advice_is_given_once(runner: Runner, kept: StepAdapters) -> None:
    runner.add_lora(adapter(GOOD))
    runner.add_lora(adapter(OTHER))
    runner.damaged, runner.pinned = set(), {GOOD, OTHER}
    for name in ("a", "b", "c"):
        kept.prepare(step({name: adapter(BAD)}))
        assert kept._broken[BAD].count(adapters.UNPIN) == 1
        assert unserved(kept) == {name}


def test_it_is_read_again_after_a_while(runner: Runner, kept: StepAdapters, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.prepare(step({"a": adapter(BAD)}))
    assert unserved(kept) == {"a"}
    runner.damaged.clear()
    kept.prepare(step({"b": adapter(BAD)}))
    assert (unserved(kept), runner.read) == ({"b"}, [BAD])
    monkeypatch.setattr(step_adapters, "PATIENCE", 0.0)
    kept.prepare(step({"c": adapter(BAD)}))
    assert (unserved(kept), runner.read) == (frozenset(), [BAD, BAD])


def test_one_that_is_to_be_replaced_is_read_once(runner: Runner, kept: StepAdapters) -> None:
    runner.add_lora(adapter(GOOD))
    taken = step({"a": adapter(GOOD, load_inplace=True)})
    kept.prepare(taken)
    [new] = taken.scheduled_new_reqs
    assert (new.lora_request.lora_int_id, new.lora_request.load_inplace) == (GOOD, False)
    assert runner.read == [GOOD, GOOD]


def test_an_output_that_is_still_being_copied_is_noted_when_it_is_there(runner: Runner, kept: StepAdapters) -> None:
    class Copied(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})

    kept.prepare(step({"a": adapter(BAD)}))
    output = kept.tell(Copied())
    assert isinstance(output, AsyncModelRunnerOutput)
    assert getattr(output.get_output(), _NOTE) == {"a"}
