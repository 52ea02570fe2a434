"""Checks that a worker with new weights discards everything that was computed with the old ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from vllm_backplane.device.graph import CapturedCalls, Graph
from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.runner.step_graphs import StepGraphs
from vllm_backplane.worker import worker as module
from vllm_backplane.worker.worker import BackplaneWorker


class Recording(Graph):
    """A graph of the host, which records nothing."""

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


@pytest.mark.parametrize("update", ["reload_weights", "finish_weight_update"])
@pytest.mark.parametrize("while_serving", [True, False])
def test_graphs_and_kept_blocks_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, update: str, while_serving: bool
) -> None:
    """Graphs are discarded only if they can be captured again while the worker serves."""
    called: list[str] = []
    graphs = captured(while_serving=while_serving)
    worker: Any = object.__new__(BackplaneWorker)
    worker.model_runner = SimpleNamespace(model=graphs)
    worker.offered_weights = SimpleNamespace(invalidate=lambda: called.append("offered weights"))
    connector = SimpleNamespace(weights_changed=lambda: called.append("KV offload"))
    monkeypatch.setattr(module, "connector_of_worker", lambda: connector)
    monkeypatch.setattr(Worker, update, lambda _self: called.append("vLLM"))
    getattr(worker, update)()
    assert called == ["vLLM", "offered weights", "KV offload"]
    assert len(graphs.calls) == (0 if while_serving else 1)
