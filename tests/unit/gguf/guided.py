"""Implements a small coverage-guided fuzzer: inputs that reach new pairs of successive lines are mutated further.

The number of runs is bounded and the random generator is seeded, so a failure is reproducible.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

INTERESTING = (0, 1, 2, 7, 8, 9, 31, 32, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 64) - 1)


class Coverage:
    """Records the pairs of successive lines executed in files whose path contains `marker`."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._last = 0
        self.seen: set[tuple[str, int, int]] = set()

    def __enter__(self) -> Coverage:
        sys.settrace(self._entered)
        return self

    def __exit__(self, *_fault: object) -> None:
        sys.settrace(None)

    def _entered(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if self._marker in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.seen.add((frame.f_code.co_filename, self._last, frame.f_lineno))
            self._last = frame.f_lineno
        return self._line


def mutated(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(6):
            case 0 if made:
                made[min(at, len(made) - 1)] ^= 1 << chance.randrange(8)
            case 1:
                size = chance.choice((1, 4, 8))
                made[at : at + size] = (chance.choice(INTERESTING) % (1 << 8 * size)).to_bytes(size, "little")
            case 2:
                del made[at : at + chance.choice((1, 4, 8, 32))]
            case 3:
                made[at:at] = chance.randbytes(chance.choice((1, 4, 8)))
            case 4:
                made[at:at] = made[at : at + chance.choice((8, 16, 64))]
            case 5:
                other = chance.choice(others)
                begin = chance.randrange(len(other) + 1)
                made[at:] = other[begin:]
    return bytes(made[: 1 << 14])


def fuzz(target: Callable[[bytes], None], seeds: Iterable[bytes], runs: int, marker: str, seed: int = 0) -> Coverage:
    """Runs `target` on mutations of the seeds and returns the coverage. An exception of `target` ends the run."""
    chance, kept, reached = random.Random(seed), list(seeds), Coverage(marker)
    for data in kept:
        with reached:
            target(data)
    for _ in range(runs):
        data = mutated(chance.choice(kept), kept, chance)
        before = len(reached.seen)
        with reached:
            target(data)
        if len(reached.seen) > before:
            kept.append(data)
    return reached
