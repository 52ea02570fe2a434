"""Measures the time of each operator in a block of code, and costs nothing outside of such a block.

Callers look `Operator.call` up at each call. In the block it is a function that measures, and calls PyTorch's operator
as before, so the computation is the same. A replayed graph calls no operator from Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_backplane.ops.operator import Operator, declared


class OperatorTimes:
    """Adds up the seconds of operators that are called in its `measured` blocks. Times of nested calls count once."""

    def __init__(self, add: Callable[[str, float], None], synchronize: Callable[[], None] | None) -> None:
        """`add` gets the name and seconds of each call. `synchronize` waits for a device that computes asynchronously,
        whose calls would otherwise only be launched in the measured time."""
        self._add = add
        self._synchronize = synchronize
        self._depth = 0
        self._calls = [(one, one.call, self._timed(one)) for one in declared().values()]

    @contextmanager
    def measured(self) -> Iterator[None]:
        for operator, _, timed in self._calls:
            _set_call(operator, timed)
        try:
            yield
        finally:
            for operator, call, _ in self._calls:
                _set_call(operator, call)

    def _timed(self, operator: Operator) -> Callable[..., Any]:
        name, call = operator.name, operator.call

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return call(*args, **kwargs)
            if self._synchronize is not None:
                self._synchronize()
            self._depth += 1
            began = time.perf_counter()
            try:
                result = call(*args, **kwargs)
                if self._synchronize is not None:
                    self._synchronize()
                return result
            finally:
                self._depth -= 1
                self._add(name, time.perf_counter() - began)

        return timed


def _set_call(operator: Operator, call: Any) -> None:
    object.__setattr__(operator, "call", call)  # the declaration is frozen for everyone else
