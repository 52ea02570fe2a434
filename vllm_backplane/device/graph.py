"""Defines a device's graph interface (capture once, replay often) and `CapturedCalls`, which keeps graphs by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_backplane.errors import GraphError, StaleInputError


class Graph(ABC):
    """Captures launches once and replays them any number of times; `Device.new_graph` creates a graph.

    A replay runs the recorded launches with the recorded addresses: it reads the current contents of its inputs' memory
    and writes its results to the same memory as the capture. Memory allocated during the capture belongs to the graph.
    """

    @abstractmethod
    def capture(self) -> AbstractContextManager[None]:
        """Returns a context in which this thread's launches on its current stream are recorded.

        They run only if `Capabilities.capture_computes` is set. It is an error to wait for the device during a capture,
        or to copy from memory that will not exist at a replay.
        """

    @abstractmethod
    def replay(self) -> None:
        """Queues the recorded launches on the current stream. The host does not wait."""


Inputs = Mapping[str, torch.Tensor]


class _Location(NamedTuple):
    """Holds the address and layout of a tensor, which must not change between capture and replay; its contents may."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Location:
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    inputs: Mapping[str, _Location]
    outputs: Any
    """The results of the call, kept alive because the graph writes into them."""


class CapturedCalls:
    """Keeps graphs by key. The key must determine the launches completely, except for the contents of the inputs."""

    def __init__(self, new_graph: Callable[[], Graph]) -> None:
        self._new_graph = new_graph
        self._captured: dict[Hashable, _Captured] = {}
        self.replays = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        self._captured.clear()

    def capture(self, key: Hashable, call: Callable[[], Any], inputs: Inputs) -> Any:
        """Captures `call` and returns its results, which hold values only if a capture computes."""
        graph = self._new_graph()
        with graph.capture():
            outputs = call()
        self._captured[key] = _Captured(graph, {name: _Location.of(one) for name, one in inputs.items()}, outputs)
        return outputs

    def replay(self, key: Hashable, inputs: Inputs) -> Any:
        """Replays a captured call with the current contents of its inputs; returns the same tensors every time."""
        if key not in self._captured:
            raise GraphError(f"no graph was captured for {key}; capture it during warm-up, or run this step eagerly")
        captured = self._captured[key]
        now = {name: _Location.of(tensor) for name, tensor in inputs.items()}
        if now != captured.inputs:
            raise StaleInputError(f"{_difference(captured.inputs, now)} at the replay of {key}; {_REMEDY}")
        captured.graph.replay()
        self.replays += 1
        return captured.outputs


_REMEDY = (
    "the graph would read stale data: copy into the tensor that was captured, or start without graphs "
    "(-cc.cudagraph_mode=none)"
)


def _difference(then: Mapping[str, _Location], now: Mapping[str, _Location]) -> str:
    for name in sorted(then.keys() | now.keys()):
        if name not in now:
            return f"the captured input {name} is absent"
        if name not in then:
            return f"the input {name} was not captured"
        if then[name] != now[name]:
            moved = then[name].address != now[name].address
            return f"the input {name} " + ("is another tensor" if moved else f"has the shape {tuple(now[name].shape)}")
    raise AssertionError("nothing differs")
