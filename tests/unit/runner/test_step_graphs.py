"""Tests that the replay of a step is refused if any tensor that it reads is not the captured one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

from vllm_backplane.attention.metadata import BackplaneAttentionMetadata
from vllm_backplane.device import Device, MemoryInfo, Probe
from vllm_backplane.device.graph import Graph
from vllm_backplane.errors import GraphError
from vllm_backplane.runner.step_graphs import StepGraphs

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


class Recording(Graph):
    """Stands in for a graph and captures nothing; the tests are about which steps may be replayed."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        yield

    def replay(self) -> None:
        pass


class Recorder(Device):
    name = "recorder"
    torch_type = "cpu"
    dispatch_key = "CPU"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(available=True, count=1)

    def memory(self, index: int = 0) -> MemoryInfo:
        return MemoryInfo(total=1, free=1)

    def new_graph(self, index: int = 0) -> Graph:
        return Recording()


class Step:
    """Holds one decode step of two layers, each with metadata and slots of its own."""

    def __init__(self) -> None:
        self.ids = torch.zeros(2, dtype=torch.int64)
        self.positions = torch.zeros(2, dtype=torch.int64)
        self.metadata = {
            layer: BackplaneAttentionMetadata(
                num_actual_tokens=2,
                query_start_loc=torch.arange(3, dtype=torch.int32),
                seq_lens=torch.ones(2, dtype=torch.int32),
                block_table=torch.zeros(2, 4, dtype=torch.int32),
                causal=True,
            )
            for layer in LAYERS
        }
        self.slots = {layer: torch.zeros(2, dtype=torch.int64) for layer in LAYERS}

    def take(self, graphs: StepGraphs) -> Any:
        context = ForwardContext(
            no_compile_layers={},
            attn_metadata=self.metadata,  # type: ignore[arg-type]
            slot_mapping=self.slots,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=BatchDescriptor(num_tokens=2, num_reqs=2, uniform=True),
        )
        with override_forward_context(context):
            return graphs(self.ids, positions=self.positions)

    def swap(self, layer: str, field: str) -> None:
        held = getattr(self.metadata[layer], field)
        self.metadata[layer] = replace(self.metadata[layer], **{field: held.clone()})


@pytest.fixture
def graphs() -> StepGraphs:
    return StepGraphs(lambda ids, positions: ids + positions, VllmConfig(), Recorder(), 0)


def swapped_argument(step: Step) -> None:
    step.ids = step.ids.clone()


def swapped_keyword(step: Step) -> None:
    step.positions = step.positions.clone()


def swapped_slots(step: Step) -> None:
    step.slots[LAYERS[1]] = step.slots[LAYERS[1]].clone()


def swapped(field: str, layer: int) -> Callable[[Step], None]:
    return lambda step: step.swap(LAYERS[layer], field)


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        pytest.param(swapped_argument, "input 0 is another tensor", id="argument"),
        pytest.param(swapped_keyword, "input positions is another tensor", id="keyword"),
        pytest.param(swapped("seq_lens", 0), f"input seq_lens of {LAYERS[0]} is another", id="seq_lens"),
        pytest.param(swapped("block_table", 1), f"input block_table of {LAYERS[1]} is another", id="block_table"),
        pytest.param(swapped("query_start_loc", 1), f"input query_start_loc of {LAYERS[1]} is", id="query_start_loc"),
        pytest.param(swapped_slots, f"input slots of {LAYERS[1]} is another tensor", id="slot mapping"),
    ],
)
def test_any_other_tensor_is_refused(graphs: StepGraphs, mistake: Callable[[Step], None], error: str) -> None:
    step = Step()
    step.take(graphs)
    step.take(graphs)
    assert (len(graphs.calls), graphs.calls.replays) == (1, 1)
    mistake(step)
    with pytest.raises(GraphError, match=error):
        step.take(graphs)
    assert graphs.calls.replays == 1


def test_new_contents_of_the_same_tensors_are_not(graphs: StepGraphs) -> None:
    step = Step()
    step.take(graphs)
    step.ids.fill_(3)
    step.metadata[LAYERS[0]].seq_lens.add_(1)
    step.slots[LAYERS[0]].fill_(9)
    step.take(graphs)
    assert graphs.calls.replays == 1


def test_a_step_that_is_not_to_be_replayed_is_called(graphs: StepGraphs) -> None:
    with override_forward_context(ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})):
        assert graphs(torch.ones(2), positions=torch.ones(2)).tolist() == [2, 2]
    assert len(graphs.calls) == 0
