"""Checks that a worker with new weights discards everything that was computed with the old ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from vllm_backplane.device.graph import CapturedCalls, Graph
from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.errors import BackplaneError
from vllm_backplane.runner.step_graphs import StepGraphs
from vllm_backplane.worker import worker as module
from vllm_backplane.worker.worker import BackplaneWorker


class Recording(Graph):
    """Stands in for a graph of the host, which records nothing."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        yield

    def replay(self) -> None:
        pass


def captured(*, while_serving: bool) -> StepGraphs:
    """Returns a model with one captured step."""
    graphs = StepGraphs(lambda: None, VllmConfig(), CpuDevice(), 0)
    graphs.captures_while_serving = while_serving
    graphs.calls = CapturedCalls(Recording)
    graphs.calls.capture("step", lambda: None, {})
    return graphs


BEGIN, END = ["offered weights", "KV offload begins"], ["KV offload ends"]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the list of what a worker calls when its weights change."""
    calls: list[str] = []
    connector = SimpleNamespace(
        begin_weight_change=lambda: calls.append("KV offload begins"),
        end_weight_change=lambda: calls.append("KV offload ends"),
    )
    monkeypatch.setattr(module, "connector_of_worker", lambda: connector)
    return calls


def worker_with(graphs: StepGraphs, called: list[str]) -> Any:
    worker: Any = object.__new__(BackplaneWorker)
    worker.model_runner = SimpleNamespace(model=graphs)
    worker.offered_weights = SimpleNamespace(invalidate=lambda: called.append("offered weights"))
    return worker


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        (["reload_weights"], [*BEGIN, "vLLM", *END]),
        (["start_weight_update", "finish_weight_update"], ["vLLM", *BEGIN, "vLLM", *END]),
        (["start_draft_weight_update", "finish_weight_update"], ["vLLM", *BEGIN, "vLLM", *END]),
    ],
)
@pytest.mark.parametrize("while_serving", [True, False])
def test_graphs_and_kept_blocks_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, called: list[str], updates: list[str], expected: list[str], while_serving: bool
) -> None:
    """Graphs are discarded only if they can be captured again while the worker serves."""
    graphs = captured(while_serving=while_serving)
    worker = worker_with(graphs, called)
    for update in updates:
        monkeypatch.setattr(Worker, update, lambda _self: called.append("vLLM"))
        getattr(worker, update)()
    assert called == expected
    assert len(graphs.calls) == (0 if while_serving else 1)


def test_weights_that_were_set_to_zero_begin_a_change(monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    # vLLM 0.30 and 0.31 do not have it.
    monkeypatch.setattr(Worker, "reset_weights", lambda self: called.append("vLLM"), raising=False)
    worker = worker_with(captured(while_serving=True), called)
    worker.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    worker.model_config = SimpleNamespace(quantization=None)
    worker.reset_weights()
    assert called == [*BEGIN, "vLLM"]


def test_a_vllm_that_cannot_set_weights_to_zero(monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    monkeypatch.delattr(Worker, "reset_weights", raising=False)
    worker = worker_with(captured(while_serving=True), called)
    worker.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    worker.model_config = SimpleNamespace(quantization=None)
    with pytest.raises(BackplaneError, match=r"install vLLM 0\.32 or a later release"):
        worker.reset_weights()
    assert called == []


@pytest.mark.parametrize(("load_format", "quantization"), [("auto", "gguf"), ("backplane_shared", None)])
def test_mapped_weights_cannot_be_set_to_zero(called: list[str], load_format: str, quantization: str | None) -> None:
    worker = worker_with(captured(while_serving=True), called)
    worker.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
    worker.model_config = SimpleNamespace(quantization=quantization)
    with pytest.raises(BackplaneError, match=r"cannot be set to zero: with .* they are mapped"):
        worker.reset_weights()
    assert called == []


def test_after_a_change_that_failed_the_weights_are_unknown(monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    def fail(_self: Any) -> None:
        raise OSError("a file is damaged")

    monkeypatch.setattr(Worker, "reload_weights", fail)
    with pytest.raises(OSError, match="damaged"):
        worker_with(captured(while_serving=True), called).reload_weights()
    assert called == BEGIN


@pytest.mark.parametrize(("level", "expected"), [(1, []), (2, BEGIN)])
def test_sleep_that_loses_the_weights_begins_a_change(called: list[str], level: int, expected: list[str]) -> None:
    worker = worker_with(captured(while_serving=True), called)
    worker.backplane_device, worker.card = CpuDevice(), 0
    worker.model_config = SimpleNamespace()
    worker.model_runner.get_model = lambda: torch.nn.Linear(1, 1)
    worker.sleeper = SimpleNamespace(sleep=lambda *_: None, discard=lambda _tags: None)
    worker._fall_asleep(level)
    assert called == expected


@pytest.mark.parametrize(("tag", "expected"), [("kv_cache", []), ("weights", BEGIN)])
def test_weights_that_are_discarded_begin_a_change(called: list[str], tag: str, expected: list[str]) -> None:
    worker = worker_with(captured(while_serving=True), called)
    worker.sleeper = SimpleNamespace(discard=lambda _tags: None)
    worker._discard((tag,))
    assert called == expected
