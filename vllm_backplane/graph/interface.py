"""A graph: launches that were recorded once and are queued again as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager


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
