"""Records the steps of a worker for /metrics: times, replays and eager steps, memory, operators, card errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_backplane.device.contract import Device
from vllm_backplane.metrics import series
from vllm_backplane.metrics.series import Series
from vllm_backplane.metrics.values_file import ValuesFile
from vllm_backplane.ops.operator import declared
from vllm_backplane.ops.timing import OperatorTimes

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only

MEMORY_SECONDS = 2.0
"""Seconds between two measurements of memory while steps run."""
FIRST_SAMPLED = 16
"""The first step whose operators are measured, unless the interval is shorter. Earlier ones warm caches up."""

PREFILL, UNEVEN_DRAFTS, SAMPLED = "prefill", "uneven drafts", "sampled"
CAPTURE, NOT_CAPTURED, NOT_CAPTURABLE, SUSPENDED = "capture", "not captured", "not capturable", "suspended"
LORA, SEVERAL_WORKERS, GRAPHS_OFF = "LoRA", "several workers", "graphs off"

KINDS = ("total", "used", "peak")
CARD_FAILURES = (torch.AcceleratorError, torch.OutOfMemoryError)
"""Exceptions by which PyTorch reports that a card failed, or that its memory is full."""


class StepGraphs(Protocol):
    """Describes what the recorder needs of `runner/step_graphs.py`."""

    calls: Sized
    suspended: bool
    outcome: str
    """Why the last step was not replayed; empty if it was."""


@dataclass(frozen=True, slots=True)
class Modes:
    """Describes how the steps of a worker can run."""

    graphs: StepGraphs | None
    """None if no step is captured."""
    without_graphs: str | None
    """The reason of eager decode steps if no step is captured; None if it is unknown how they run."""
    decode_tokens: int
    """Tokens of each sequence in a decode step that can be captured: 1, and with speculation the draft tokens too."""

    def reasons(self) -> list[str]:
        """Returns the reasons of eager steps that can occur."""
        drafts = [UNEVEN_DRAFTS] if self.decode_tokens > 1 else []
        if self.graphs is None:
            return [PREFILL, *drafts, *([self.without_graphs] if self.without_graphs else [])]
        return [PREFILL, *drafts, CAPTURE, NOT_CAPTURED, NOT_CAPTURABLE, SUSPENDED, SAMPLED]

    def eager_reason(self, tokens: Mapping[str, int], total: int, *, sampled: bool) -> str | None:
        """Returns why a step with these tokens of each request ran eagerly, an empty text if it was replayed, or None
        if that is unknown."""
        each = self.decode_tokens
        if each == 1:
            if total != len(tokens):
                return PREFILL
        elif (largest := max(tokens.values())) > each:
            return PREFILL
        elif largest < each or total != each * len(tokens):
            return UNEVEN_DRAFTS
        if self.graphs is None:
            return self.without_graphs
        return SAMPLED if sampled else self.graphs.outcome


class StepRecorder:
    """Counts the steps of one worker, and publishes the counts after each."""

    def __init__(
        self,
        path: Path,
        rank: int,
        runner: Any,
        device: Device,
        card: int,
        modes: Modes,
        sample_every: int,
        is_observed: Callable[[], bool] = lambda: False,
    ) -> None:
        """`runner` has an attribute `forward_began`, the time at which it has called the model, unless it cannot tell
        the preparation of inputs from the forward pass. Operators are measured in one step of `sample_every`, or never
        if that is 0. `is_observed` returns whether a trace or the numeric guard needs to see each step as it is."""
        self._runner, self._device, self._card, self._modes = runner, device, card, modes
        self._is_observed = is_observed
        self._has_inputs = hasattr(runner, "forward_began")
        self._every, self._next_sampled = sample_every, min(sample_every, FIRST_SAMPLED)
        self._steps = 0
        self._is_sampled = False
        self._memory_at, self._memory_failed = 0.0, False
        label = str(rank)
        parts = (series.FORWARD, series.SAMPLE, *([series.INPUTS] if self._has_inputs else []))
        operators = declared() if sample_every else ()
        listed: list[Series] = [
            *((series.MEMORY, (label, kind)) for kind in KINDS),
            *((series.STEP_SECONDS, (label, part)) for part in parts),
            *([(series.STEPS, (label, "replayed", ""))] if modes.graphs is not None else []),
            *((series.STEPS, (label, "eager", reason)) for reason in modes.reasons()),
            (series.GRAPHS, (label,)),
            (series.CARD_ERRORS, (label,)),
            *([(series.SAMPLED_STEPS, (label,))] if sample_every else []),
            *((series.OPERATOR_SECONDS, (label, name)) for name in operators),
        ]
        self._file = ValuesFile(path, listed)
        self._values, places = self._file.values, self._file.places
        self._memory = [places[series.MEMORY, (label, kind)] for kind in KINDS]
        self._parts = {part: places[series.STEP_SECONDS, (label, part)] for part in parts}
        self._mode_places = {labels[2]: place for (metric, labels), place in places.items() if metric == series.STEPS}
        self._graphs = places[series.GRAPHS, (label,)]
        self._errors = places[series.CARD_ERRORS, (label,)]
        self._sampled_steps = places.get((series.SAMPLED_STEPS, (label,)))
        self._operators = {name: places[series.OPERATOR_SECONDS, (label, name)] for name in operators}
        wait = device.synchronize if device.capabilities.streams else None
        self._times = OperatorTimes(self._add_operator, wait) if sample_every else None
        self.measure_memory()

    # --- steps --------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, tokens: Mapping[str, int], total: int) -> Iterator[None]:
        """Records the inputs and the forward pass of a step with these tokens of each request, and their total."""
        self._is_sampled = self._is_next_sampled()
        self._runner.forward_began = began = time.perf_counter()
        with self.card_errors_counted(), self._sampling():
            yield
        now, values = time.perf_counter(), self._values
        called = self._runner.forward_began if self._has_inputs else began
        if self._has_inputs:
            values[self._parts[series.INPUTS]] += called - began
        values[self._parts[series.FORWARD]] += now - called
        reason = self._modes.eager_reason(tokens, total, sampled=self._is_sampled)
        if reason is not None:
            values[self._mode_places[reason]] += 1
        if self._modes.graphs is not None:
            values[self._graphs] = len(self._modes.graphs.calls)
        if self._is_sampled and self._sampled_steps is not None:
            values[self._sampled_steps] += 1
        if now - self._memory_at >= MEMORY_SECONDS:
            self.measure_memory()
        self._file.save()

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Records the sampling of a step's tokens, after `forward`."""
        began = time.perf_counter()
        with self.card_errors_counted(), self._sampling():
            yield
        now = time.perf_counter()
        self._is_sampled = False
        self._values[self._parts[series.SAMPLE]] += now - began
        self._file.save()

    # --- operators ----------------------------------------------------------------------------------------------------

    def _is_next_sampled(self) -> bool:
        """Counts a step, and returns whether its operators are measured. They are not while hooks on modules measure or
        check the same step."""
        self._steps += 1
        if not self._every or self._steps < self._next_sampled:
            return False
        self._next_sampled = self._steps + self._every
        return not self._is_observed() and (self._modes.graphs is None or not self._modes.graphs.suspended)

    def _sampling(self) -> AbstractContextManager[None]:
        return self._measured_eagerly() if self._is_sampled else nullcontext()

    @contextmanager
    def _measured_eagerly(self) -> Iterator[None]:
        """Measures operators in the block, in which no graph is replayed: a replay calls no operator from Python. The
        eager step launches the same kernels with the same inputs."""
        assert self._times is not None
        graphs = self._modes.graphs
        if graphs is not None:
            graphs.suspended = True
        try:
            with self._times.measured():
                yield
        finally:
            if graphs is not None:
                graphs.suspended = False

    def _add_operator(self, name: str, seconds: float) -> None:
        self._values[self._operators[name]] += seconds

    # --- the card -----------------------------------------------------------------------------------------------------

    def measure_memory(self) -> None:
        """Measures the memory of the card, and publishes it. A failure is logged once: it concerns a figure of /metrics
        alone, and ends no engine."""
        self._memory_at = time.perf_counter()
        try:
            now = self._device.memory(self._card)
            measured = now.total, now.used, self._device.peak_memory(self._card)
        except Exception as fault:
            if not self._memory_failed:
                logger.error("The metrics of the memory of card %d stay as they are: %s", self._card, fault)
            self._memory_failed = True
            return
        for place, value in zip(self._memory, measured, strict=True):
            self._values[place] = value
        self._file.save()

    @contextmanager
    def card_errors_counted(self) -> Iterator[None]:
        """Counts an error of the card that the block raises."""
        try:
            yield
        except CARD_FAILURES:
            self._values[self._errors] += 1
            self._file.save()
            raise

    def remove(self) -> None:
        """Removes the published values when the worker ends."""
        self._file.remove()
