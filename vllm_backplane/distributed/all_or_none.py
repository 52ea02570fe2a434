"""Runs an action on all workers of an engine or on none: the ranks share any failure, and the last rank raises it.

vLLM reads the responses of a call in rank order and stops at the first error. The responses of the higher ranks would
then be read as those of the next call, so only the last rank may raise.
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


def gather_failure(failure: T | None) -> T | None:
    """Returns the same failure on all ranks: the first that any rank has passed, or None. A collective call."""
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            gathered: list[T | None] = [None] * group.world_size
            torch.distributed.all_gather_object(gathered, failure, group=group.cpu_group)
            failure = next((one for one in gathered if one is not None), None)
    return failure


def is_reporting_rank(parallel: ParallelConfig, rank: int) -> bool:
    """Returns whether this rank raises an error that all ranks share: the last one does."""
    return rank == parallel.world_size - 1


def raise_on_reporting_rank(parallel: ParallelConfig, rank: int, reason: str) -> None:
    """Raises on the last rank, and returns on the others. For a refusal that every rank has reached without
    communication."""
    if is_reporting_rank(parallel, rank):
        raise BackplaneError(reason)


def run_all_or_none(
    parallel: ParallelConfig, rank: int, act: Callable[[], None], undo: Callable[[], None] | None = None
) -> None:
    """Runs `act` on every rank and, if it fails on one, `undo` on all. If `undo` fails too, the content of memory is
    unknown, and the workers exit rather than serve from it."""
    failure = gather_failure(_attempt(act, rank))
    if failure is None:
        return
    if undo is not None and (worse := gather_failure(_attempt(undo, rank))) is not None:
        logger.critical("%s; and it could not be undone: %s. This worker exits.", failure, worse)
        raise SystemExit(f"{failure}; and it could not be undone: {worse}")
    raise_on_reporting_rank(parallel, rank, failure)


def _attempt(act: Callable[[], None], rank: int) -> str | None:
    """Runs `act`. Returns None, or what it raised as text that names the rank."""
    try:
        act()
    except Exception as fault:
        logger.exception("Rank %d failed", rank)
        return f"rank {rank}: {fault or type(fault).__name__}"
    return None
