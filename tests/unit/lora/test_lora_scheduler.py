"""Tests which scheduler is chosen, and that it fails the requests which a worker marked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_backplane import guards
from vllm_backplane.config import scheduling
from vllm_backplane.lora import scheduler

USERS_OWN = "package.module.Scheduler"


def chosen(
    lora: bool,
    ahead: bool,
    given: str | None = None,
    runner: str = "generate",
    connector: str | None = None,
    diffusion: object = None,
) -> str | None:
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    config: Any = SimpleNamespace(
        lora_config=SimpleNamespace() if lora else None,
        scheduler_config=SimpleNamespace(async_scheduling=ahead, scheduler_cls=given),
        model_config=SimpleNamespace(runner_type=runner),
        kv_transfer_config=transfer,
        diffusion_config=diffusion,
    )
    scheduling.choose_scheduler(config)
    found: str | None = config.scheduler_config.scheduler_cls
    assert scheduling.can_fail_requests(config) is (found in (scheduling.SCHEDULER, scheduling.ASYNC_SCHEDULER))
    return found


def test_with_adapters_it_is_ours() -> None:
    assert resolve_obj_by_qualname(scheduling.SCHEDULER) is scheduler.BackplaneScheduler
    assert resolve_obj_by_qualname(scheduling.ASYNC_SCHEDULER) is scheduler.BackplaneAsyncScheduler
    assert issubclass(scheduler.BackplaneAsyncScheduler, AsyncScheduler)
    assert issubclass(scheduler.BackplaneScheduler, Scheduler)
    assert chosen(lora=True, ahead=False) == scheduling.SCHEDULER
    assert chosen(lora=True, ahead=True) == scheduling.ASYNC_SCHEDULER
    assert chosen(lora=True, ahead=False, given=scheduling.ASYNC_SCHEDULER) == scheduling.SCHEDULER, "a copy"
    assert chosen(lora=True, ahead=True, connector="BackplaneOffloadConnector") == scheduling.ASYNC_SCHEDULER
    assert chosen(lora=True, ahead=True, diffusion=object()) is None, "vLLM has one of its own"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lora": False, "ahead": True}, None),
        ({"lora": True, "ahead": True, "given": USERS_OWN}, USERS_OWN),
        ({"lora": True, "ahead": True, "runner": "pooling"}, None),
        ({"lora": True, "ahead": True, "connector": "Another"}, None),
    ],
    ids=["no adapters", "the user's own", "embeddings", "another's KV connector"],
)
def test_otherwise_it_is_left_alone(given: dict[str, Any], expected: str | None) -> None:
    assert chosen(**given) == expected


@pytest.mark.parametrize("kind", [scheduler.BackplaneScheduler, scheduler.BackplaneAsyncScheduler])
def test_it_verifies_what_it_depends_on_in_the_engine_core(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(guards._GUARDS, "use", used.append)
    with pytest.raises(TypeError, match=r"Scheduler.__init__\(\) missing"):
        kind()
    assert set(used) == {"LoRA"}
    targets = {guard.target.partition(":")[2] for guard in guards._GUARDS.declared if guard.place == scheduler.__name__}
    assert targets >= {"Scheduler.update_from_output", "Scheduler.finish_requests", "KVCacheManager.evict_blocks"}


POOL = 30


class Request:
    trace_headers = None
    num_preemptions = 0

    def __init__(self, name: str, client: int) -> None:
        self.request_id, self.client_index = name, client
        self.status = RequestStatus.RUNNING

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)

    def get_finished_reason(self) -> FinishReason | None:
        return RequestStatus.get_finished_reason(self.status)

    def take_events(self) -> None:
        return None


class Upstream:
    """Stands in for the parts of vLLM's scheduler that are used; it returns a token for every unfinished request."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = {one.request_id: one for one in requests}
        self.evicted: set[int] = set()
        self.blocks = {one.request_id: ([place, 10 + place],) for place, one in enumerate(requests, 1)}
        pool = SimpleNamespace(blocks=[None] * POOL, null_block=SimpleNamespace(block_id=0))
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=self.blocks.get, evict_blocks=self.evicted.update, block_pool=pool
        )

    def finish_requests(self, names: list[str], status: RequestStatus) -> None:
        for name in names:
            self.requests.pop(name).status = status

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        made: dict[int, EngineCoreOutputs] = {}
        for one in self.requests.values():
            outputs = made.setdefault(one.client_index, EngineCoreOutputs()).outputs
            outputs.append(EngineCoreOutput(request_id=one.request_id, new_token_ids=[7]))
        return made


class Ending(scheduler._FailsMarkedRequests, Upstream):
    pass


def test_requests_that_were_not_served_end_with_an_error_and_nothing_else() -> None:
    ending = Ending([Request("a", 0), Request("b", 1), Request("c", 0)])
    output = scheduler.mark_failed_requests(ModelRunnerOutput(req_ids=[], req_id_to_index={}), frozenset({"b", "c"}))
    made = ending.update_from_output(None, output)  # type: ignore[arg-type]
    found = {
        (client, one.request_id): (one.new_token_ids, one.finish_reason)
        for client, outputs in made.items()
        for one in outputs.outputs
    }
    assert found == {(0, "a"): ([7], None), (1, "b"): ([], FinishReason.ERROR), (0, "c"): ([], FinishReason.ERROR)}
    assert ending.evicted == {2, 12, 3, 13}, "what was computed for them"
    assert list(ending.requests) == ["a"]


@pytest.mark.parametrize("what", ["cancelled", "preempted", "resumed", "behind a sliding window"])
def test_where_blocks_were_given_back_the_whole_cache_is_forgotten(what: str) -> None:
    """Freed blocks keep their hashes, and a later request with the same beginning would continue from them."""
    ending = Ending([Request("a", 0), Request("b", 0)])
    if what == "cancelled":
        ending.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    elif what == "preempted":
        ending.requests["b"].status = RequestStatus.PREEMPTED
        ending.blocks["b"] = ([],)  # type: ignore[assignment]
    elif what == "resumed":
        ending.requests["b"].num_preemptions = 1
    else:
        ending.blocks["b"] = ([0, 12],)
    output = scheduler.mark_failed_requests(ModelRunnerOutput(req_ids=[], req_id_to_index={}), frozenset({"b"}))
    ending.update_from_output(None, output)  # type: ignore[arg-type]
    assert ending.evicted == set(range(POOL))
    assert list(ending.requests) == ["a"]


def test_the_whole_cache_can_be_forgotten_while_blocks_are_in_use() -> None:
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    used, free = pool.get_new_blocks(2)
    for block, name in ((used, b"used"), (free, b"free")):
        pool._insert_block_hash(make_block_hash_with_group_id(BlockHash(name), 0), block, num_tokens=16)
    assert all(pool.get_cached_block(BlockHash(name), [0]) for name in (b"used", b"free"))
    pool.free_blocks([free])
    pool.evict_blocks(set(range(len(pool.blocks))))
    assert (used.ref_cnt, pool.get_num_free_blocks()) == (1, 6)
    assert not any(pool.get_cached_block(BlockHash(name), [0]) for name in (b"used", b"free"))


def test_other_steps_are_vllms() -> None:
    ending = Ending([Request("a", 0)])
    made = ending.update_from_output(None, ModelRunnerOutput(req_ids=[], req_id_to_index={}))  # type: ignore[arg-type]
    assert [one.new_token_ids for one in made[0].outputs] == [[7]]
    assert ending.evicted == set()
