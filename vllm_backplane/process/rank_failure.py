"""A worker that fails where nobody listens ends its process, because the others would wait for it.

vLLM's executor reads the answer to a step from one rank, and where it reads them all, one after another. What any other
rank raises is logged there and forgotten: that rank waits for its next call while the rest wait for it in a collective,
until the executor gives up after minutes. The death of a process, however, vLLM notices at once, and ends the engine.

The answer itself is dropped as well.
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
PATIENCE = 1.0
"""Seconds for the rank that is heard to fail of the same and to say so: its words reach the user, this end does not."""


def is_heard(parallel: ParallelConfig, rank: int) -> bool:
    """Whether what this rank raises reaches the engine: it is alone, or the one whose answer is read.

    That one is the first of the last pipeline stage, as the executor computes it. With a KV connector, the answers of
    all are read in the order of ranks, so one that fails is heard only after those before it, which may wait for it.
    Executors of another kind (each process with an engine of its own, or the user's class) hand every exception on.
    """
    if parallel.world_size == 1 or parallel.distributed_executor_backend not in ("mp", "ray"):
        return True
    per_stage = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return rank == parallel.world_size - per_stage


def order_after_copy(output: Any) -> None:
    """Let what is queued from here on come after the copy of an answer that nobody reads.

    vLLM drops such an answer while a stream of its own copies it to the host, and with it the tensors it is copied
    from: their memory would be written again during the copy. Who reads an answer waits for it first.
    """
    if not isinstance(output, AsyncModelRunnerOutput):
        return
    for name in ("async_copy_ready_event", "copy_event"):  # of the first runner, and of the second
        if (event := getattr(output, name, None)) is not None:
            event.wait()
            return
    output.get_output()


@contextmanager
def insist_on_being_heard(parallel: ParallelConfig, rank: int, doing: str) -> Iterator[None]:
    """An exception of a rank that is not heard is told in the log, and is the end of the process."""
    try:
        yield
    except Exception:
        if is_heard(parallel, rank):
            raise
        logger.exception(
            "Rank %d failed in %s. The engine listens to another rank, which would wait for this one: "
            "the worker ends, and with it the engine.",
            rank,
            doing,
        )
        # Not through sys.exit: vLLM's loop takes exceptions of any call for an answer, and threads that wait for the
        # other ranks would hold the interpreter up.
        time.sleep(PATIENCE)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STATUS)
