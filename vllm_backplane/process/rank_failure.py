"""Terminates the worker process when a rank whose output vLLM does not read raises in a step.

vLLM's executor reads the output of a step from one rank; with a KV connector, from all ranks in order. It only logs an
exception of a rank that it does not read, or has not reached. The failed rank then waits for its next call while the
other ranks wait for it in a collective, until the executor times out after minutes. The death of a process, in
contrast, is detected at once and ends the engine.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.config import ParallelConfig
from vllm.logger import init_logger

from vllm_backplane.guards import guarded

logger = init_logger("vllm." + __name__)

EXIT_STATUS = 1
GRACE_SECONDS = 1.0
"""Seconds before the process exits. If the output rank fails for the same reason, its exception reaches the user first.
Without the delay, this exit would hide that exception."""


@guarded(
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor._get_output_rank",
    why="the rank that the executor reads is computed in the same way",
)
def is_output_rank(parallel: ParallelConfig, rank: int) -> bool:
    """Returns whether the engine reads what this rank returns in a step, and so sees its exceptions.

    The executors for several processes read the first rank of the last pipeline stage. With a KV connector they read
    all ranks in order: they see an exception only after the output of every lower rank, and those ranks may be waiting
    for the failed one, so only that same rank counts. A single rank is read, and other executors (one engine per
    process, or a class of the user's) pass every exception on.
    """
    if parallel.world_size == 1 or parallel.distributed_executor_backend not in ("mp", "ray"):
        return True
    per_stage = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return rank == parallel.world_size - per_stage


@contextmanager
def exit_unless_output_rank(parallel: ParallelConfig, rank: int, operation: str) -> Iterator[None]:
    """Logs an exception in the block and exits the process, unless the engine reads this rank: then it is raised."""
    try:
        yield
    except Exception:
        if is_output_rank(parallel, rank):
            raise
        logger.exception(
            "Rank %d failed in %s. The engine reads another rank, which would wait for this one: "
            "this worker exits, and the engine with it.",
            rank,
            operation,
        )
        # Not sys.exit: vLLM's worker loop catches the exceptions of every call, and threads that wait for the other
        # ranks would keep the interpreter alive.
        time.sleep(GRACE_SECONDS)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STATUS)
