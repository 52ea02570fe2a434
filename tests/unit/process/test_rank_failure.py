"""Checks that an exception of a rank whose output vLLM does not read ends its process, and that others are raised."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from vllm.config import ParallelConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import async_utils

from tests import programs
from vllm_backplane.process.rank_failure import (
    EXIT_STATUS,
    is_output_rank,
    terminate_on_unread_failure,
    wait_for_output_copy,
)

SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 3)]


def parallel(tensor: int, pipeline: int, backend: str = "mp") -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, distributed_executor_backend=backend
    )


@pytest.mark.parametrize(("tensor", "pipeline"), SIZES)
def test_only_the_rank_that_vllm_reads_is_an_output_rank(tensor: int, pipeline: int) -> None:
    config = parallel(tensor, pipeline)
    executor = object.__new__(MultiprocExecutor)
    executor.parallel_config, executor.world_size = config, tensor * pipeline
    output_ranks = [rank for rank in range(tensor * pipeline) if is_output_rank(config, rank)]
    assert output_ranks == [executor._get_output_rank()]


def test_every_process_with_an_engine_of_its_own_is_an_output_rank() -> None:
    assert all(is_output_rank(parallel(2, 2, "external_launcher"), rank) for rank in range(4))


def test_a_failure_of_an_output_rank_is_raised() -> None:
    with pytest.raises(ValueError, match="a card is gone"), terminate_on_unread_failure(parallel(2, 1), 0, "a step"):
        raise ValueError("a card is gone")


def test_a_request_to_end_is_no_failure() -> None:
    with pytest.raises(SystemExit), terminate_on_unread_failure(parallel(2, 1), 1, "a step"):
        sys.exit(3)


CHILD = """
from vllm.config import ParallelConfig
from vllm_backplane.process.rank_failure import terminate_on_unread_failure

parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp")
try:
    with terminate_on_unread_failure(parallel, 1, "execute_model"):
        raise ValueError("a card is gone")
except BaseException:
    print("it was raised")
print("it goes on")
"""


@pytest.mark.process
def test_a_failure_of_another_rank_is_logged_and_ends_the_process(tmp_path: Path) -> None:
    done = programs.run(programs.command(CHILD), timeout=120, cwd=tmp_path)
    assert done.returncode == EXIT_STATUS
    output = done.stdout + done.stderr
    assert "Rank 1 failed in execute_model" in output
    assert "ValueError: a card is gone" in output, "with its traceback"
    assert "was raised" not in output and "goes on" not in output


class Output(AsyncModelRunnerOutput):
    """An output that is being copied. `done` records the calls."""

    def __init__(self, event: str | None) -> None:
        self.done: list[str] = []
        if event is not None:
            setattr(self, event, self)

    def wait(self) -> None:
        self.done.append("later work waits")

    def get_output(self) -> None:
        self.done.append("the host waits")


@pytest.mark.parametrize("event", ["async_copy_ready_event", "copy_event", None])
def test_an_output_that_is_not_read_is_copied_before_it_is_dropped(event: str | None) -> None:
    output = Output(event)
    wait_for_output_copy(output)
    assert output.done == ["later work waits" if event else "the host waits"]
    wait_for_output_copy(None)


def test_those_are_the_names_of_vllms_events() -> None:
    for output, event in (
        (gpu_model_runner.AsyncGPUModelRunnerOutput, "async_copy_ready_event"),
        (gpu_model_runner.AsyncGPUPoolingModelRunnerOutput, "async_copy_ready_event"),
        (async_utils.AsyncOutput, "copy_event"),
        (async_utils.AsyncPoolingOutput, "copy_event"),
    ):
        assert f"self.{event} = " in inspect.getsource(output.__init__)
