"""Captures and replays graphs on the CPU: the C++ library records a call's operators and runs them without Python.

The capture computes as it records, so the captured call returns valid results.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from vllm_backplane.device.graph import Graph
from vllm_backplane.devices.cpu import native
from vllm_backplane.errors import GraphError

_STATISTICS = ("operators", "views", "bytes", "copies")
"""Names of the library's statistics, in the order of its numbers."""


@cache
def _library() -> ctypes.CDLL:
    if (fault := native.fault()) is not None:
        raise GraphError(f"{fault[0]}, and it contains the graphs; {fault[1]}, or start with -cc.cudagraph_mode=none")
    library = native.library()
    library.backplane_cpu_graph_error.restype = ctypes.c_char_p
    library.backplane_cpu_graph_memories.restype = ctypes.c_int64
    library.backplane_cpu_graph_figure.restype = ctypes.c_int64
    library.backplane_cpu_graph_figure.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.backplane_cpu_graph_replay.argtypes = [ctypes.c_void_p]
    library.backplane_cpu_graph_replay_timed.argtypes = [ctypes.c_void_p]
    library.backplane_cpu_graph_step.restype = ctypes.c_char_p
    library.backplane_cpu_graph_step.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_double)]
    library.backplane_cpu_graph_destroy.argtypes = [ctypes.c_void_p]
    library.backplane_cpu_graph_destroy.restype = None
    library.backplane_cpu_graph_abandon.restype = None
    return library


def _check(status: int, failure: str) -> None:
    """Raises a GraphError with the library's reason unless the status is 0."""
    if status != 0:
        reason = _library().backplane_cpu_graph_error().decode(errors="replace")
        raise GraphError(f"{failure}: {reason}; start without graphs (-cc.cudagraph_mode=none)")


class CpuGraph(Graph):
    """Captures and replays a graph of the C++ library."""

    def __init__(self) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()

    @contextmanager
    def capture(self) -> Iterator[None]:
        if self._handle:
            raise GraphError("this graph was captured already; create another one")
        _check(self._library.backplane_cpu_graph_begin(), "the capture cannot begin")
        try:
            yield
        except BaseException:
            self._library.backplane_cpu_graph_abandon()
            raise
        status = self._library.backplane_cpu_graph_end(ctypes.byref(self._handle))
        _check(status, "the captured call cannot be a graph")
        weakref.finalize(self, self._library.backplane_cpu_graph_destroy, self._handle)

    def replay(self) -> None:
        if not self._handle:
            raise GraphError("this graph was never captured; call capture() first")
        if self._library.backplane_cpu_graph_replay(self._handle) != 0:
            _check(-1, "the replay failed")

    def timed_replay(self) -> list[tuple[str, float]]:
        """Replays and returns the name, result shape and seconds of each operator, in order."""
        if not self._handle:
            raise GraphError("this graph was never captured; call capture() first")
        _check(self._library.backplane_cpu_graph_replay_timed(self._handle), "the replay failed")
        found: list[tuple[str, float]] = []
        seconds = ctypes.c_double()
        while label := self._library.backplane_cpu_graph_step(self._handle, len(found), ctypes.byref(seconds)):
            found.append((label.decode(), seconds.value))
        return found

    def statistics(self) -> dict[str, int]:
        """Returns the number of replayed operators, of omitted views, of bytes, and of results copied so far."""
        if not self._handle:
            raise GraphError("this graph was never captured; call capture() first")
        count = self._library.backplane_cpu_graph_figure
        return {name: int(count(self._handle, index)) for index, name in enumerate(_STATISTICS)}


def live_graph_memories() -> int:
    """Returns how many graphs of this process still have memory, held by the graph or by one of its result tensors."""
    return int(_library().backplane_cpu_graph_memories())
