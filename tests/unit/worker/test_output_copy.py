"""Tests that an output is copied to the host before it is dropped."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import async_utils
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_backplane.process.vllm_torch import HostEvent, HostStream, View
from vllm_backplane.worker.worker import wait_for_output_copy

PARAMETERS = signature(async_utils.AsyncOutput.__init__).parameters


class RecordingEvent(HostEvent):
    """Counts how often later work waits for the event."""

    waits = 0

    def wait(self, stream: Any = None) -> None:
        self.waits += 1


@pytest.fixture
def streams_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives vLLM's outputs the streams of the host, and events that record."""
    cuda, seen = View(torch.cuda), View(torch)
    cuda.replace(
        Event=RecordingEvent,
        current_stream=torch.cpu.current_stream,
        stream=torch.cpu.stream,
        set_stream=lambda _stream: None,
    )
    seen.replace(cuda=cuda)
    for module in (gpu_model_runner, async_utils):
        monkeypatch.setattr(module, "torch", seen)


def empty() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})


def v1_tokens() -> AsyncModelRunnerOutput:
    return gpu_model_runner.AsyncGPUModelRunnerOutput(
        model_runner_output=empty(),
        sampled_token_ids=torch.zeros((1, 1), dtype=torch.int64),
        logprobs_tensors=None,
        invalid_req_indices=[],
        async_output_copy_stream=HostStream(),
        vocab_size=10,
    )


def v1_pooling() -> AsyncModelRunnerOutput:
    return gpu_model_runner.AsyncGPUPoolingModelRunnerOutput(
        model_runner_output=empty(),
        raw_pooler_output=torch.zeros((1, 2)),
        finished_mask=[True],
        async_output_copy_stream=HostStream(),
    )


def v2_tokens() -> AsyncModelRunnerOutput:
    one = torch.ones(1, dtype=torch.int32)
    later = {"pending_aux_output": None} if "pending_aux_output" in PARAMETERS else {}  # not in vLLM 0.30
    return async_utils.AsyncOutput(
        model_runner_output=empty(),
        sampler_output=SamplerOutput(torch.zeros((1, 1), dtype=torch.int64), None, None, one, one),
        num_sampled_tokens=one,
        main_stream=HostStream(),
        copy_stream=HostStream(),
        check_ep_fault=False,
        **later,
    )


def v2_pooling() -> AsyncModelRunnerOutput:
    return async_utils.AsyncPoolingOutput(
        model_runner_output=empty(),
        pooler_output=torch.zeros((1, 2)),
        finished_mask=[True],
        main_stream=HostStream(),
        copy_stream=HostStream(),
    )


@pytest.mark.usefixtures("streams_of_the_host")
@pytest.mark.parametrize("make", [v1_tokens, v1_pooling, v2_tokens, v2_pooling])
def test_later_work_waits_for_the_copy_of_an_output_of_vllm(make: Callable[[], AsyncModelRunnerOutput]) -> None:
    output = make()
    [event] = [value for value in vars(output).values() if isinstance(value, RecordingEvent)]
    wait_for_output_copy(output)
    assert event.waits == 1


class OutputWithoutEvent(AsyncModelRunnerOutput):
    """Counts how often the host waits for the output."""

    waits = 0

    def get_kv_connector_output(self) -> None:
        """Returns None: vLLM 0.33 requires this method of every output."""

    def get_output(self) -> None:
        self.waits += 1


def test_the_host_waits_for_an_output_without_event() -> None:
    output = OutputWithoutEvent()
    wait_for_output_copy(output)
    assert output.waits == 1


def test_nothing_waits_without_an_output() -> None:
    wait_for_output_copy(None)
