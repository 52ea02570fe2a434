"""Extends vLLM's schedulers to measure the time of scheduling.

vLLM's statistics do not have it, and the time between the engine's calls of its workers would include idle time. The
subclasses measure the two calls in which a scheduler works: `schedule`, and `update_from_output`.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_backplane.metrics import folder, series
from vllm_backplane.metrics.values_file import ValuesFile
from vllm_backplane.settings.carried_state import state_of


class SchedulingTime:
    """Publishes the seconds that the scheduler of an engine has worked. It does nothing if metrics are off."""

    def __init__(self, vllm_config: Any) -> None:
        self._file: ValuesFile | None = None
        name = state_of(vllm_config).metrics_folder
        if name is not None and (at := folder.existing(name)) is not None:
            rank = folder.first_rank(vllm_config.parallel_config)
            listed = [(series.STEP_SECONDS, (str(rank), series.SCHEDULE))]
            self._file = ValuesFile.created(at / f"scheduler-{rank}", listed)

    def add_since(self, began: float) -> None:
        if self._file is not None:
            self._file.values[0] += time.perf_counter() - began

    def save(self) -> None:
        if self._file is not None:
            self._file.save()

    def remove(self) -> None:
        if self._file is not None:
            self._file.remove()


class MeasuredScheduler(Scheduler):
    """Measures the time of vLLM's scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scheduling_time = SchedulingTime(self.vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        scheduled = super().schedule(*args, **kwargs)
        self.scheduling_time.add_since(began)
        return scheduled

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        outputs = super().update_from_output(*args, **kwargs)
        self.scheduling_time.add_since(began)
        self.scheduling_time.save()  # both calls of a step at once
        return outputs

    def shutdown(self) -> None:
        super().shutdown()
        self.scheduling_time.remove()


class MeasuredAsyncScheduler(MeasuredScheduler, AsyncScheduler):
    """Measures the time of vLLM's scheduler for async scheduling."""
