"""Records which lines of a parser an input reaches, so that inputs which reach new ones are changed further."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class Coverage:
    """Records the pairs of successive lines executed in files whose path contains one of `markers`."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = markers
        self._last = 0
        self._files: dict[str, bool] = {}
        self.seen: set[tuple[str, int, int]] = set()

    def __enter__(self) -> Coverage:
        sys.settrace(self._entered)
        return self

    def __exit__(self, *_fault: object) -> None:
        sys.settrace(None)

    def _entered(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._files:
            self._files[name] = any(marker in name for marker in self._markers)
        return self._line if self._files[name] else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.seen.add((frame.f_code.co_filename, self._last, frame.f_lineno))
            self._last = frame.f_lineno
        return self._line

    def lines(self) -> set[tuple[str, int]]:
        """Returns the executed lines as (file, number)."""
        return {(name, line) for name, _before, line in self.seen}
