"""A step as vLLM runs it, seen from outside of its runners: how many rows, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.core.sched.output import SchedulerOutput


def rows_of_step() -> int | None:
    """Tokens in the forward pass that runs now, padding included; None outside of one."""
    if not is_forward_context_available():
        return None
    described = get_forward_context().batch_descriptor
    return None if described is None else int(described.num_tokens)


def tokens_by_request(runner: Any, scheduled: SchedulerOutput) -> Mapping[str, int] | None:
    """Tokens of each request in the step, in the order of the step's rows; None if the runner does not say."""
    order = getattr(getattr(runner, "input_batch", None), "req_ids", None)
    if order is None or set(order) != set(scheduled.num_scheduled_tokens):
        return None
    return {request: scheduled.num_scheduled_tokens[request] for request in order}
