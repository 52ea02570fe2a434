"""Tests that an output is copied to the host before it is dropped."""

from __future__ import annotations

import inspect

import pytest
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import async_utils

from vllm_backplane.worker.output_copy import wait_for_output_copy


class Output(AsyncModelRunnerOutput):
    """An output that is being copied. `done` records the calls."""

    def __init__(self, event: str | None) -> None:
        self.done: list[str] = []
        if event is not None:
            setattr(self, event, self)

    def get_kv_connector_output(self) -> None:
        """vLLM 0.33 requires it."""

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
