"""Terminates the worker process when a rank whose output vLLM does not read raises in a step.

vLLM's executor reads the output of a step from one rank, or from all ranks one after another. An exception of any other
rank is only logged: that rank waits for its next call while the remaining ranks wait for it in a collective, until the
executor times out after minutes. The death of a process, in contrast, is detected at once and ends the engine.

vLLM discards the outputs of these ranks too, possibly while they are still being copied to the host:
`wait_for_output_copy` keeps the source tensors from being overwritten.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import ParallelConfig
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput

logger = init_logger("vllm." + __name__)

EXIT_STATUS = 1
GRACE_SECONDS = 1.0
"""Seconds before the process exits. If the output rank fails for the same reason, its exception reaches the user first,
without the delay, this exit would hide it."""


def is_output_rank(parallel: ParallelConfig, rank: int) -> bool:
    """Returns whether the engine sees an exception of this rank: the rank is the only one, or the executor reads it.

    The executor reads the first rank of the last pipeline stage. With a KV connector it reads all ranks in order, so an
    exception is seen only after the output of every lower rank, and those ranks may be waiting for the failed one.
    Other executors (one engine per process, or a class of the user's) pass every exception on.
    """
    if parallel.world_size == 1 or parallel.distributed_executor_backend not in ("mp", "ray"):
        return True
    per_stage = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return rank == parallel.world_size - per_stage


def wait_for_output_copy(output: Any) -> None:
    """Makes later work on the current stream wait for the copy of an output that vLLM discards.

    vLLM copies an output to the host on a separate stream. On a rank whose output is not read, it drops the output, and
    with it the source tensors, during that copy: their memory would be reused and overwritten. On the output rank the
    reader waits for the copy.
    """
    if not isinstance(output, AsyncModelRunnerOutput):
        return
    for name in ("async_copy_ready_event", "copy_event"):  # of the V1 and of the V2 model runner
        if (event := getattr(output, name, None)) is not None:
            event.wait()
            return
    output.get_output()


@contextmanager
def terminate_on_unread_failure(parallel: ParallelConfig, rank: int, operation: str) -> Iterator[None]:
    """Logs an exception in the block and exits the process, unless this is an output rank, where it is raised."""
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
