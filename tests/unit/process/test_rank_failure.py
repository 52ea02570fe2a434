"""Checks that an exception of a rank whose output vLLM does not read ends its process, and that others are raised."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vllm.config import ParallelConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tests import programs
from vllm_backplane.process.rank_failure import (
    EXIT_STATUS,
    exit_unless_output_rank,
    is_output_rank,
)

SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 3)]


def parallel(tensor: int, pipeline: int, backend: str = "mp") -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, distributed_executor_backend=backend
    )


@pytest.mark.parametrize(("tensor", "pipeline"), SIZES)
def test_the_is_output_rank_the_rank_that_vllm_names(tensor: int, pipeline: int) -> None:
    config = parallel(tensor, pipeline)
    executor = object.__new__(MultiprocExecutor)
    executor.parallel_config, executor.world_size = config, tensor * pipeline
    read = [rank for rank in range(tensor * pipeline) if is_output_rank(config, rank)]
    assert read == [executor._get_output_rank()]


def test_every_process_with_an_engine_of_its_own_is_read() -> None:
    assert all(is_output_rank(parallel(2, 2, "external_launcher"), rank) for rank in range(4))


def test_a_failure_of_a_rank_that_is_read_is_raised() -> None:
    with pytest.raises(ValueError, match="a card is gone"), exit_unless_output_rank(parallel(2, 1), 0, "a step"):
        raise ValueError("a card is gone")


def test_a_request_to_end_is_no_failure() -> None:
    with pytest.raises(SystemExit), exit_unless_output_rank(parallel(2, 1), 1, "a step"):
        sys.exit(3)


CHILD = """
from vllm.config import ParallelConfig
from vllm_backplane.process.rank_failure import exit_unless_output_rank

parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp")
try:
    with exit_unless_output_rank(parallel, 1, "execute_model"):
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
