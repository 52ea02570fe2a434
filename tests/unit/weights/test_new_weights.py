"""When a worker has got other weights, nothing stays that was made with the old ones."""

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
from vllm_backplane.runner.decode_graphs import StepGraphs
from vllm_backplane.worker import worker as module
from vllm_backplane.worker.worker import BackplaneWorker


class Recording(Graph):
    """The host records nothing."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        yield

    def replay(self) -> None:
        pass


def captured(*, while_serving: bool) -> StepGraphs:
    """A model with one captured step."""
    graphs = StepGraphs(lambda: None, VllmConfig(), CpuDevice(), 0)
    graphs.while_serving = while_serving
    graphs.calls = CapturedCalls(Recording)
    graphs.calls.capture("step", lambda: None, {})
    return graphs


@pytest.mark.parametrize("update", ["reload_weights", "finish_weight_update"])
@pytest.mark.parametrize("while_serving", [True, False])
def test_graphs_and_kept_blocks_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, update: str, while_serving: bool
) -> None:
    """Graphs only where they can be captured again while the worker serves."""
    told: list[str] = []
    graphs = captured(while_serving=while_serving)
    worker: Any = object.__new__(BackplaneWorker)
    worker.model_runner = SimpleNamespace(model=graphs)
    worker.offered_weights = SimpleNamespace(changed=lambda: told.append("those who load from here"))
    tier = SimpleNamespace(weights_changed=lambda: told.append("the second tier"))
    monkeypatch.setattr(module, "connector_of_worker", lambda: tier)
    monkeypatch.setattr(Worker, update, lambda _self: told.append("vLLM"))
    getattr(worker, update)()
    assert told == ["vLLM", "those who load from here", "the second tier"]
    assert len(graphs.calls) == (0 if while_serving else 1)
