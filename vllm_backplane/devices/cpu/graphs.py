"""Graphs of the host's processor: the library notes a call's operators and computes them again without Python.

The capture computes as it records, so what the captured call returns is the result for what its inputs hold.
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

_FIGURES = ("operators", "views", "bytes", "copies")


@cache
def _library() -> ctypes.CDLL:
    if (fault := native.fault()) is not None:
        raise GraphError(f"{fault[0]}, and graphs are part of it; {fault[1]}, or start with -cc.cudagraph_mode=none")
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


def _insist(status: int, doing: str) -> None:
    if status != 0:
        reason = _library().backplane_cpu_graph_error().decode(errors="replace")
        raise GraphError(f"{doing}: {reason}; start without graphs (-cc.cudagraph_mode=none)")


class CpuGraph(Graph):
    def __init__(self) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()

    @contextmanager
    def capture(self) -> Iterator[None]:
        if self._handle:
            raise GraphError("a graph is captured once; make another one")
        _insist(self._library.backplane_cpu_graph_begin(), "the capture cannot begin")
        try:
            yield
        except BaseException:
            self._library.backplane_cpu_graph_abandon()
            raise
        status = self._library.backplane_cpu_graph_end(ctypes.byref(self._handle))
        _insist(status, "what was computed cannot be a graph")
        weakref.finalize(self, self._library.backplane_cpu_graph_destroy, self._handle)

    def replay(self) -> None:
        if not self._handle:
            raise GraphError("this graph was never captured")
        if self._library.backplane_cpu_graph_replay(self._handle) != 0:
            _insist(-1, "the replay failed")

    def timed_replay(self) -> list[tuple[str, float]]:
        """Replays, and says how many seconds each operator took, in their order; the shape is that of its result."""
        if not self._handle:
            raise GraphError("this graph was never captured")
        _insist(self._library.backplane_cpu_graph_replay_timed(self._handle), "the replay failed")
        found: list[tuple[str, float]] = []
        seconds = ctypes.c_double()
        while label := self._library.backplane_cpu_graph_step(self._handle, len(found), ctypes.byref(seconds)):
            found.append((label.decode(), seconds.value))
        return found

    def figures(self) -> dict[str, int]:
        """Operators of a replay, those that it does without, bytes of memory, results that had to be moved so far."""
        if not self._handle:
            raise GraphError("this graph was never captured")
        count = self._library.backplane_cpu_graph_figure
        return {name: int(count(self._handle, place)) for place, name in enumerate(_FIGURES)}


def memories() -> int:
    """Graphs of this process whose memory is held, by themselves or by a tensor that they gave."""
    return int(_library().backplane_cpu_graph_memories())
