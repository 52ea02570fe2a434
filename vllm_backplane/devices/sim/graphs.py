"""Captures and replays graphs on the simulated NPU, through its driver."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint64

from vllm_backplane.device.graph import Graph
from vllm_backplane.devices.sim.library import driver, library, runtime
from vllm_backplane.errors import GraphError


class SimGraph(Graph):
    """Captures and replays a graph of the driver."""

    def __init__(self, card: int) -> None:
        self._card = card
        self._handle = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        if self._handle:
            raise GraphError("this graph was captured already; create another one")
        stream, handle = runtime("current_stream", self._card), c_uint64()
        driver("capture_begin", stream, 0)
        try:
            yield
        except BaseException:
            # The capture must end in any case. The original error is raised, not a consequential one of ending it.
            if library().bpsim_capture_end(stream, byref(handle)) == 0:
                driver("graph_destroy", handle.value)
            raise
        driver("capture_end", stream, byref(handle))
        self._handle = handle.value
        weakref.finalize(self, library().bpsim_graph_destroy, self._handle)

    def replay(self) -> None:
        if not self._handle:
            raise GraphError("this graph was never captured; call capture() first")
        driver("graph_launch", runtime("current_stream", self._card), self._handle)
