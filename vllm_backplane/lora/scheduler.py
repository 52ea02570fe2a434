"""Extends vLLM's schedulers to fail single requests whose LoRA adapter could not be loaded.

vLLM's worker cannot fail a single request: an exception in a step ends the engine. A worker that could not load an
adapter (`lora/prefetch.py`) therefore marks the requests on its output, and these subclasses of vLLM's schedulers,
which --scheduler-cls could name as well, end them with an error before they process the rest of the output. Their KV
blocks are evicted from the prefix cache, because the base model computed them.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_backplane.guards import guarded
from vllm_backplane.metrics.scheduler import MeasuredAsyncScheduler, MeasuredScheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

_ATTRIBUTE = "backplane_failed_requests"


def mark_failed_requests(output: Any, requests: frozenset[str]) -> Any:
    """Returns a worker's output with the failed requests attached, also if it is still being copied from the device."""
    if isinstance(output, AsyncModelRunnerOutput):
        return _MarkedOutput(output, requests)
    marked = copy(output)  # vLLM shares one object among all steps without tokens
    setattr(marked, _ATTRIBUTE, requests)
    return marked


class _MarkedOutput(AsyncModelRunnerOutput):
    def __init__(self, output: AsyncModelRunnerOutput, requests: frozenset[str]) -> None:
        self._output, self._requests = output, requests

    def get_output(self) -> ModelRunnerOutput:
        return mark_failed_requests(self._output.get_output(), self._requests)

    def get_kv_connector_output(self) -> Any:
        """Returns the output of the KV connector if `get_output` failed. vLLM calls it since 0.33."""
        return self._output.get_kv_connector_output()


@guarded(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    why="it skips requests that have finished, and its outputs are extended",
    feature="LoRA",
    mentions=("is_finished", "EngineCoreOutputs"),
)
@guarded(
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
    "vllm.v1.core.block_pool:BlockPool.evict_blocks",
    why="a request that failed is ended, and its KV blocks are evicted",
    feature="LoRA",
)
@guarded(
    "vllm.v1.core.block_pool:BlockPool.__init__",
    why="blocks that a request has freed are recognized by the null block in their place",
    feature="LoRA",
    mentions=("blocks", "null_block"),
)
class _FailsMarkedRequests:
    """Ends marked requests with an error, as a mixin for both of vLLM's schedulers."""

    requests: dict[str, Request]
    kv_cache_manager: Any
    finish_requests: Any

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        failed = self._fail(getattr(model_runner_output, _ATTRIBUTE, ()))
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for request in failed:
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _fail(self, names: Iterable[str]) -> list[Request]:
        """Ends the requests and evicts their KV blocks. Returns those that had not ended before."""
        names = list(names)
        failed = [self.requests[name] for name in names if name in self.requests]  # the others were aborted meanwhile
        failed = [request for request in failed if not request.is_finished()]
        blocks = [self._all_blocks(request) for request in failed]
        if len(failed) < len(names) or None in blocks:
            # Some blocks were freed with their hashes, and the scheduler has no record of which. The whole prefix cache
            # is evicted; blocks in use stay with their requests.
            self.kv_cache_manager.evict_blocks(set(range(len(self.kv_cache_manager.block_pool.blocks))))
        else:
            for some in blocks:
                self.kv_cache_manager.evict_blocks(some)
        if failed:
            self.finish_requests([request.request_id for request in failed], RequestStatus.FINISHED_ERROR)
        return failed

    def _all_blocks(self, request: Request) -> set[int] | None:
        """Returns every KV block that the request has had, or None if it has freed some: it was preempted, or they are
        behind a sliding window."""
        blocks = {block for group in self.kv_cache_manager.get_block_ids(request.request_id) for block in group}
        has_freed = request.num_preemptions or self.kv_cache_manager.block_pool.null_block.block_id in blocks
        return None if has_freed or not blocks else blocks


class BackplaneScheduler(_FailsMarkedRequests, MeasuredScheduler):
    pass


class BackplaneAsyncScheduler(_FailsMarkedRequests, MeasuredAsyncScheduler):
    pass
