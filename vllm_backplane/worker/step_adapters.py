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
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from vllm_backplane import scheduling
from vllm_backplane.scheduler import note_unserved
from vllm_backplane.worker import adapters

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
        self._stand_ins: set[int] = set()
        self._unserved: frozenset[str] = frozenset()

    def prepare(self, step: SchedulerOutput) -> None:
        self._unserved = frozenset()
        wanted = self._wanted(step)
        there = self._runner.list_loras() if wanted else set()
        missing = {one.lora_int_id: one for one in wanted.values() if one.lora_int_id not in there or one.load_inplace}
        if not missing:
            return
        for one in wanted.values():
            if one.lora_int_id not in missing:
                self._runner.add_lora(one)  # is used now, so others make room
        for number, one in sorted(missing.items()):
            self._load(number, one)
        self._unserved = frozenset(name for name, one in wanted.items() if one.lora_int_id in self._broken)
        for new in step.scheduled_new_reqs:
            if new.req_id in self._unserved:
                new.lora_request = None
            elif new.lora_request is not None and new.lora_request.load_inplace:
                # It has been, once; vLLM would read it in every step.
                new.lora_request = msgspec.structs.replace(new.lora_request, load_inplace=False)
        for name in self._unserved.intersection(step.scheduled_cached_reqs.req_ids):
            self._stand_in(wanted[name].lora_int_id)

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

    def _stand_in(self, number: int) -> None:
        """An adapter that changes nothing, for requests that the runner knows with theirs. It goes after the step."""
        if number in self._stand_ins:
            return
        manager = self._runner.get_model().lora_manager
        if manager.get_adapter(number) is not None:
            self._runner.remove_lora(number)  # it was to be replaced, and is not what the request asks for
        if len(manager) + 1 > manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(LoRAModel(number, 1, {}))
        self._stand_ins.add(number)

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
        for number in self._stand_ins:
            self._runner.remove_lora(number)
        self._broken, self._stand_ins = {}, set()
        return note_unserved(output, self._unserved) if self._unserved and output is not None else output
