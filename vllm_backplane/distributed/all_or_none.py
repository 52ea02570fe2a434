"""What all workers of an engine do, or none: they agree on the outcome, and the last one tells it.

vLLM reads answers in the order of ranks and stops at the first error: what the ranks after it have said would be taken
for answers to the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from vllm.config import ParallelConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.logger import init_logger

from vllm_backplane.errors import BackplaneError

logger = init_logger("vllm." + __name__)

T = TypeVar("T")


def agree(failure: T | None) -> T | None:
    """One failure of any worker of the engine, for all of them."""
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            told: list[T | None] = [None] * group.world_size
            torch.distributed.all_gather_object(told, failure, group=group.cpu_group)
            failure = next((one for one in told if one is not None), None)
    return failure


def tells(parallel: ParallelConfig, rank: int) -> bool:
    """Whether this worker is the one that raises what all have agreed on."""
    return rank == parallel.world_size - 1


def refuse(parallel: ParallelConfig, rank: int, reason: str) -> None:
    """What every worker knows by itself cannot be done."""
    if tells(parallel, rank):
        raise BackplaneError(reason)


def together(
    parallel: ParallelConfig, rank: int, act: Callable[[], None], undo: Callable[[], None] | None = None
) -> None:
    """Every worker acts; where one fails, all undo it. Where that fails too, nobody knows what is in memory, and the
    workers end rather than answer from it."""
    failure = agree(_attempt(act, rank))
    if failure is None:
        return
    if undo is not None and (worse := agree(_attempt(undo, rank))) is not None:
        logger.critical("%s; and it could not be undone: %s. This worker ends.", failure, worse)
        raise SystemExit(f"{failure}; and it could not be undone: {worse}")
    if tells(parallel, rank):
        raise BackplaneError(failure)


def _attempt(act: Callable[[], None], rank: int) -> str | None:
    try:
        act()
    except Exception as fault:
        logger.exception("Rank %d failed", rank)
        return f"rank {rank}: {fault or type(fault).__name__}"
    return None
