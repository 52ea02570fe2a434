"""A graph of a device records launches once and queues them again as one; `CapturedCalls` keeps graphs by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_backplane.errors import GraphError, StaleInputError


class Graph(ABC):
    """Made by `Device.new_graph`, captured once, replayed any number of times.

    A replay runs the recorded launches with the recorded addresses: it reads what is in its inputs' memory at that time
    and leaves its results where the capture left them. Memory allocated during the capture belongs to the graph.
    """

    @abstractmethod
    def capture(self) -> AbstractContextManager[None]:
        """While it is active, what this thread launches on its current stream is recorded, and run only where the
        device says so (`Capabilities.capture_computes`). Waiting for the device meanwhile, or copying from memory that
        a replay would find gone, is an error."""

    @abstractmethod
    def replay(self) -> None:
        """Queue the launches on the current stream. The host does not wait."""


Inputs = Mapping[str, torch.Tensor]


class _Place(NamedTuple):
    """Where a tensor is and how it is read; what it holds may change."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    inputs: Mapping[str, _Place]
    outputs: Any
    """Kept alive: the graph writes into them."""


class CapturedCalls:
    """Graphs by key. The key says everything that the launches depend on, but for the contents of the inputs."""

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
        """Record `call`. Its results hold something only if the device computes what it records."""
        graph = self._new_graph()
        with graph.capture():
            outputs = call()
        self._captured[key] = _Captured(graph, {name: _Place.of(one) for name, one in inputs.items()}, outputs)
        return outputs

    def replay(self, key: Hashable, inputs: Inputs) -> Any:
        """The captured call with what its inputs hold by now; the results are the same tensors every time."""
        if key not in self._captured:
            raise GraphError(f"no graph was captured for {key}; capture it during warm-up, or run this step eagerly")
        captured = self._captured[key]
        now = {name: _Place.of(tensor) for name, tensor in inputs.items()}
        if now != captured.inputs:
            raise StaleInputError(f"{_difference(captured.inputs, now)} at the replay of {key}; {_REMEDY}")
        captured.graph.replay()
        self.replays += 1
        return captured.outputs


_REMEDY = (
    "the graph would read stale data: copy into the tensor that was captured, or start without graphs "
    "(-cc.cudagraph_mode=none)"
)


def _difference(then: Mapping[str, _Place], now: Mapping[str, _Place]) -> str:
    for name in sorted(then.keys() | now.keys()):
        if name not in now:
            return f"the captured input {name} is absent"
        if name not in then:
            return f"the input {name} was not captured"
        if then[name] != now[name]:
            moved = then[name].address != now[name].address
            return f"the input {name} " + ("is another tensor" if moved else f"has become {tuple(now[name].shape)}")
    raise AssertionError("nothing differs")
