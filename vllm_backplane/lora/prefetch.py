"""The LoRA adapters of a step are loaded before it begins; requests whose adapter cannot be loaded end with an error.

vLLM reads an adapter that was pushed out of its cache (--max-cpu-loras), or that a request in Python brings with it, in
the middle of the step that needs it. Files that have gone or are damaged by then would end the engine, and one that was
made for another model would be served. Here each is held against the model as by `add_lora`. Where one fails, all
workers compute the step without it, as the model answers by itself, and say for which requests that was: the scheduler
ends them (`scheduler.py`), and nobody sees those answers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from vllm_backplane.config import scheduling
from vllm_backplane.lora import adapters
from vllm_backplane.lora.scheduler import note_unserved

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm." + __name__)

PATIENCE = 1.0
"""Seconds for which an adapter that failed is not read again. The scheduler is a step or two ahead, and may have let
requests of those begin with the KV blocks of the one that is about to end."""


class StepAdapters:
    @classmethod
    def of(cls, config: VllmConfig, runner: Any) -> StepAdapters | None:
        """Where LoRA is on and the scheduler is one that listens."""
        if config.lora_config is None or not scheduling.ends_unserved(config):
            return None
        return cls(runner, config.parallel_config)

    def __init__(self, runner: Any, parallel: ParallelConfig) -> None:
        self._runner = runner
        self._parallel = parallel
        self._failed: dict[int, tuple[float, str]] = {}
        """By number: when and why."""
        self._broken: dict[int, str] = {}
        """Of this step: why."""
        self._unserved: frozenset[str] = frozenset()

    def prepare(self, step: SchedulerOutput) -> None:
        self._unserved = frozenset()
        wanted = self._wanted(step)
        there = self._runner.list_loras() if wanted else set()
        missing = {one.lora_int_id: one for one in wanted.values() if one.lora_int_id not in there or one.load_inplace}
        if not missing:
            return
        for one in wanted.values():
            if one.lora_int_id in there:
                self._runner.add_lora(_as_it_is(one))  # is used now, so others make room
        for number, one in sorted(missing.items()):
            self._load(number, one)
        gone = self._broken.keys() - self._runner.list_loras()  # one that was to be replaced may be as it was
        self._unserved = frozenset(
            name
            for name, one in wanted.items()
            if one.lora_int_id in gone or (one.load_inplace and one.lora_int_id in self._broken)
        )
        for new in step.scheduled_new_reqs:
            if new.lora_request is None:
                continue
            # Where it was to be replaced, it has been, once, and vLLM would read it in every step; or it is as it was,
            # and so are the KV blocks that others find.
            new.lora_request = None if new.lora_request.lora_int_id in gone else _as_it_is(new.lora_request)
        for name in self._unserved.intersection(step.scheduled_cached_reqs.req_ids):
            if wanted[name].lora_int_id in gone:
                self._drop(name)

    def _wanted(self, step: SchedulerOutput) -> dict[str, LoRARequest]:
        """Adapters by request."""
        found = {new.req_id: new.lora_request for new in step.scheduled_new_reqs}
        found |= {name: self._held(name) for name in step.scheduled_cached_reqs.req_ids if name not in found}
        return {name: one for name, one in found.items() if one is not None}

    def _held(self, name: str) -> LoRARequest | None:
        """Of a request that the runner knows; its two kinds keep them in different places."""
        second = getattr(self._runner, "lora_state", None)
        if second is not None:
            return second.lora_requests.get(name)
        return getattr(self._runner.requests.get(name), "lora_request", None)

    def _load(self, number: int, request: LoRARequest) -> None:
        _, failure, raised = adapters.attempt(self._runner, request, self._parallel, self._read)
        if failure is None:
            self._failed.pop(number, None)
            return
        logger.error(
            "LoRA adapter %r was needed and could not be loaded: %s. Its requests end with an error.",
            request.lora_name,
            failure.reason,
            exc_info=raised if number not in self._failed else None,
        )
        self._broken[number] = failure.reason

    def _drop(self, name: str) -> None:
        """The adapter of a request that the runner knows; the scheduler is about to end it."""
        second = getattr(self._runner, "lora_state", None)
        if second is not None:
            second.add_request(name, self._runner.req_states.req_id_to_index[name], None)
            second.remove_request(name)
            return
        self._runner.requests[name].lora_request = None
        batch = self._runner.input_batch
        place = batch.req_id_to_index.get(name)
        number = 0 if place is None else int(batch.request_lora_mapping[place])
        if number == 0:
            return
        batch.request_lora_mapping[place] = 0
        batch.lora_id_to_request_ids[number].discard(name)
        if not batch.lora_id_to_request_ids[number]:
            del batch.lora_id_to_request_ids[number], batch.lora_id_to_lora_request[number]

    def loaded(self, number: int) -> None:
        """By `add_lora`: what was wrong with it is mended."""
        self._failed.pop(number, None)

    def _read(self, request: LoRARequest) -> bool:
        when, why = self._failed.get(request.lora_int_id, (0.0, ""))
        if why and time.monotonic() - when < PATIENCE:
            raise RuntimeError(why)
        return bool(self._runner.add_lora(request))

    def tell(self, output: Any) -> Any:
        """After a step, and what it gives, as soon as there is something."""
        now = time.monotonic()
        for number, reason in self._broken.items():
            self._failed[number] = now, reason
        self._broken = {}
        return note_unserved(output, self._unserved) if self._unserved and output is not None else output


def _as_it_is(request: LoRARequest) -> LoRARequest:
    return msgspec.structs.replace(request, load_inplace=False) if request.load_inplace else request
