"""Loads and validates the LoRA adapters of a step before the forward pass.

vLLM reads an adapter in the middle of the step that needs it, if the adapter was evicted from its cache
(--max-cpu-loras) or came with a request in Python. Files that are missing or damaged by then would end the engine, and
vLLM would serve an adapter of another model. Here each adapter is validated as by `add_lora`. If one fails, all workers
compute the step without it, with the base model, and mark the requests on their output. The scheduler ends the marked
requests (`lora/scheduler.py`), so no client receives tokens of the base model.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from vllm_backplane.config import scheduling
from vllm_backplane.guards import guarded
from vllm_backplane.lora import validation
from vllm_backplane.lora.scheduler import mark_failed_requests

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm." + __name__)

RETRY_SECONDS = 1.0
"""Seconds for which a failed adapter is not read again. The scheduler is a step or two ahead, and may have started
requests with this adapter on the KV blocks of the request that is about to end."""


@guarded(
    "vllm.v1.worker.gpu_input_batch:InputBatch.__init__",
    why="an adapter that failed is removed from the batch's tables",
    feature="LoRA",
    mentions=("request_lora_mapping", "lora_id_to_request_ids", "lora_id_to_lora_request"),
)
@guarded(
    "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
    "vllm.v1.worker.gpu_input_batch:InputBatch.remove_request",
    "vllm.v1.worker.gpu_input_batch:InputBatch.make_lora_inputs",
    "vllm.v1.worker.gpu.lora_utils:LoraState",
    why="an adapter that failed is removed from the batch's tables",
    feature="LoRA",
)
class AdapterPrefetcher:
    """Loads the adapters of each step, and marks the requests whose adapter failed on the step's output."""

    @classmethod
    def create_if_supported(cls, config: VllmConfig, runner: Any) -> AdapterPrefetcher | None:
        """Returns None without LoRA, or if the scheduler cannot fail single requests."""
        if config.lora_config is None or not scheduling.can_fail_requests(config):
            return None
        return cls(runner, config.parallel_config)

    def __init__(self, runner: Any, parallel: ParallelConfig) -> None:
        self._runner = runner
        self._parallel = parallel
        self._earlier_failures: dict[int, tuple[float, str]] = {}
        """Time and reason of the last failure, by adapter number."""
        self._step_failures: dict[int, str] = {}
        """Reasons of the adapters that failed in this step, by adapter number."""
        self._failed_requests: frozenset[str] = frozenset()

    def prepare(self, step: SchedulerOutput) -> None:
        """Loads the adapters that the step needs, and takes those that fail away from its requests."""
        self._failed_requests = frozenset()
        needed = self._adapters_by_request(step)
        loaded = self._runner.list_loras() if needed else set()
        missing = {one.lora_int_id: one for one in needed.values() if one.lora_int_id not in loaded or one.load_inplace}
        if not missing:
            return
        for one in needed.values():
            if one.lora_int_id in loaded:
                self._runner.add_lora(_without_reload(one))  # marks it as recently used, so that others are evicted
        for number, one in sorted(missing.items()):
            self._load(number, one)
        # If an adapter could not be replaced, its earlier version may still be loaded.
        absent = self._step_failures.keys() - self._runner.list_loras()
        self._failed_requests = frozenset(
            name
            for name, one in needed.items()
            if one.lora_int_id in absent or (one.load_inplace and one.lora_int_id in self._step_failures)
        )
        for new in step.scheduled_new_reqs:
            if new.lora_request is None:
                continue
            # The flag load_inplace is cleared: an adapter that was replaced above would be read again in every step,
            # and one that could not be replaced keeps its version, and with it the KV blocks that others share.
            new.lora_request = None if new.lora_request.lora_int_id in absent else _without_reload(new.lora_request)
        for name in self._failed_requests.intersection(step.scheduled_cached_reqs.req_ids):
            if needed[name].lora_int_id in absent:
                self._detach(name)

    def _adapters_by_request(self, step: SchedulerOutput) -> dict[str, LoRARequest]:
        found = {new.req_id: new.lora_request for new in step.scheduled_new_reqs}
        found |= {name: self._running_adapter(name) for name in step.scheduled_cached_reqs.req_ids if name not in found}
        return {name: one for name, one in found.items() if one is not None}

    def _running_adapter(self, name: str) -> LoRARequest | None:
        """Returns the adapter of a running request; vLLM's two runners store it in different places."""
        second = getattr(self._runner, "lora_state", None)
        if second is not None:
            return second.lora_requests.get(name)
        return getattr(self._runner.requests.get(name), "lora_request", None)

    def _load(self, number: int, request: LoRARequest) -> None:
        _, failure, raised = validation.load_and_validate(self._runner, request, self._parallel, self._read)
        if failure is None:
            self._earlier_failures.pop(number, None)
            return
        logger.error(
            "LoRA adapter %r was needed and could not be loaded: %s. Its requests end with an error.",
            request.lora_name,
            failure.reason,
            exc_info=raised if number not in self._earlier_failures else None,
        )
        self._step_failures[number] = failure.reason

    def _detach(self, name: str) -> None:
        """Takes the adapter away from a running request, which the scheduler is about to end."""
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

    def clear_failure(self, number: int) -> None:
        """Forgets the failure of an adapter that `add_lora` has loaded since."""
        self._earlier_failures.pop(number, None)

    def _read(self, request: LoRARequest) -> bool:
        when, reason = self._earlier_failures.get(request.lora_int_id, (0.0, ""))
        if reason and time.monotonic() - when < RETRY_SECONDS:
            raise RuntimeError(reason)
        return bool(validation.load_checked(self._runner, request, self._runner.add_lora))

    def mark_output(self, output: Any) -> Any:
        """Returns a step's output with its failed requests marked. The output is None until tokens are sampled."""
        now = time.monotonic()
        for number, reason in self._step_failures.items():
            self._earlier_failures[number] = now, reason
        self._step_failures = {}
        if not self._failed_requests or output is None:
            return output
        return mark_failed_requests(output, self._failed_requests)


def _without_reload(request: LoRARequest) -> LoRARequest:
    return msgspec.structs.replace(request, load_inplace=False) if request.load_inplace else request
