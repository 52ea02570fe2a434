"""Requests that a worker cannot serve end with an error, and the rest of their step goes on.

vLLM's worker has no word for that: what it raises in a step is the end of the engine. So a worker that could not load a
LoRA adapter (`lora/prefetch.py`) notes the requests on its output, and vLLM's own scheduler, in a subclass that
`--scheduler-cls` could name as well, ends those before it looks at the rest. Their KV blocks are forgotten: what was
computed for them is another model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

_NOTE = "backplane_unserved_requests"


def note_unserved(output: Any, requests: frozenset[str]) -> Any:
    """A worker's output that says so; it may be one that is still being copied from the device."""
    if isinstance(output, AsyncModelRunnerOutput):
        return _Noted(output, requests)
    noted = copy(output)  # vLLM has one for all steps without tokens
    setattr(noted, _NOTE, requests)
    return noted


class _Noted(AsyncModelRunnerOutput):
    def __init__(self, output: AsyncModelRunnerOutput, requests: frozenset[str]) -> None:
        self._output, self._requests = output, requests

    def get_output(self) -> ModelRunnerOutput:
        return note_unserved(self._output.get_output(), self._requests)


class _EndsUnserved:
    """What both of vLLM's schedulers get."""

    requests: dict[str, Request]
    kv_cache_manager: Any
    finish_requests: Any

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        ended = self._end(getattr(model_runner_output, _NOTE, ()))
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for request in ended:
            told = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(told)
        return outputs

    def _end(self, names: Iterable[str]) -> list[Request]:
        names = list(names)
        ended = [self.requests[name] for name in names if name in self.requests]  # others were cancelled meanwhile
        ended = [request for request in ended if not request.is_finished()]
        blocks = [self._all_blocks(request) for request in ended]
        if len(ended) < len(names) or None in blocks:
            # Some were given back with their hashes, and nobody knows which. Blocks in use stay with their requests.
            self.kv_cache_manager.evict_blocks(set(range(len(self.kv_cache_manager.block_pool.blocks))))
        else:
            for some in blocks:
                self.kv_cache_manager.evict_blocks(some)
        if ended:
            self.finish_requests([request.request_id for request in ended], RequestStatus.FINISHED_ERROR)
        return ended

    def _all_blocks(self, request: Request) -> set[int] | None:
        """That it has had; None where it has given some back: preempted, or behind a sliding window."""
        blocks = {block for group in self.kv_cache_manager.get_block_ids(request.request_id) for block in group}
        given_back = request.num_preemptions or self.kv_cache_manager.block_pool.null_block.block_id in blocks
        return None if given_back or not blocks else blocks


class BackplaneScheduler(_EndsUnserved, Scheduler):
    pass


class BackplaneAsyncScheduler(_EndsUnserved, AsyncScheduler):
    pass
