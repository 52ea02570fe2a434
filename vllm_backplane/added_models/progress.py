"""Shows the progress of long work on stderr: a bar on a terminal, otherwise lines, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Advance = Callable[[int], None]
"""Reports that so many bytes more are done, or fewer if work has to be repeated."""

_SECONDS_BETWEEN_LINES = 15.0
_SMALLEST_BAR = 4 << 20
"""Bytes below which work is done before a bar could be read."""


class Progress:
    """Reports messages through a function, and work on many bytes as a bar or as lines."""

    def __init__(self, report: Callable[[str], None], *, bars: bool | None = None) -> None:
        self.report = report
        self._bars = sys.stderr.isatty() if bars is None else bars

    @contextmanager
    def bar(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Yields a function that reports the bytes that are done in addition to `done`."""
        if total < _SMALLEST_BAR:
            yield _nothing
        elif self._bars:
            from tqdm import tqdm

            options: dict[str, Any] = {
                "unit": "B",
                "unit_scale": True,
                "unit_divisor": 1024,
                "dynamic_ncols": True,
                "leave": False,
            }
            with tqdm(desc=label, total=total, initial=done, **options) as shown:

                def advance(count: int) -> None:
                    shown.update(count)

                yield advance
        else:
            yield self._lines(label, total, done)

    def _lines(self, label: str, total: int, done: int) -> Advance:
        last = time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, last
            done += count
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.report(f"{label}: {size_text(done)} of {size_text(total)}")

        return advance


QUIET = Progress(lambda _message: None, bars=False)


def size_text(size: int) -> str:
    """Returns a number of bytes for people: ``4.1 GiB``."""
    if size < 1024:
        return f"{size} bytes"
    place = min((size.bit_length() - 1) // 10, 4)
    return f"{size / 1024**place:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[place - 1]}"


def _nothing(_count: int) -> None:
    pass
