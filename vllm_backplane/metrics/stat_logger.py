"""Implements the stat logger by which vLLM's API server shows Backplane's metrics on /metrics.

vLLM calls a stat logger after every step. This one does nothing then. With one API server, a Prometheus collector reads
the values when /metrics is requested. Several API servers answer such a request from files that Prometheus' own library
keeps for each process; then the first server counts the values there, once a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_backplane.errors import BackplaneError
from vllm_backplane.metrics import folder
from vllm_backplane.metrics.series import METRICS, OPERATOR_SECONDS, Series
from vllm_backplane.metrics.values_file import read
from vllm_backplane.settings.carried_state import state_of

logger = init_logger("vllm." + __name__)

SECONDS = 1.0
"""Seconds between two updates with several API servers."""

Family = CounterMetricFamily | GaugeMetricFamily


class BackplaneStatLogger(AggregateStatLoggerBase):
    """Exports the metrics of the engines of one configuration. It does nothing if another platform is active."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        if not getattr(type(current_platform), "is_backplane", False):
            return
        names = state_of(vllm_config).metrics_folder
        if names is None:
            return
        values = Values(names)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:  # as vLLM chooses the registry of /metrics
            _register(ValuesCollector(values))
        elif not folder.rank_of_api_server(vllm_config.parallel_config):
            threading.Thread(target=_update, args=(values,), name="backplane-metrics", daemon=True).start()

    def record(self, *_: Any, **__: Any) -> None:
        """Does nothing: the values are read when they are needed."""

    def log_engine_initialized(self) -> None:
        """Does nothing."""


class Values:
    """Reads the values of all workers and schedulers that write to the folders of these names."""

    def __init__(self, names: str) -> None:
        self._names = names
        self._reported: set[Path] = set()

    def __iter__(self) -> Iterator[tuple[Series, float]]:
        """Yields the series with their values. Operators that no sampled step has called are left out. Logs an
        unreadable file or folder, once: the other metrics of the server are shown."""
        try:
            files = list(folder.files(self._names))
        except FileNotFoundError:  # a folder was removed meanwhile
            return
        except (OSError, BackplaneError) as fault:
            self._report(Path(self._names), fault)
            return
        for path in files:
            try:
                found = read(path)
            except FileNotFoundError:  # its process has ended
                continue
            except (OSError, BackplaneError) as fault:
                self._report(path, fault)
                continue
            for series, value in found:
                if value or series[0] != OPERATOR_SECONDS:
                    yield series, value

    def _report(self, path: Path, fault: Exception) -> None:
        if path not in self._reported:
            self._reported.add(path)
            logger.error("Metrics of a process are left out: %s", fault)


class ValuesCollector(Collector):
    """Reads the values when Prometheus' library collects them."""

    def __init__(self, values: Iterable[tuple[Series, float]]) -> None:
        self._values = values

    def describe(self) -> list[Family]:
        return list(_families().values())

    def collect(self) -> list[Family]:
        families = _families()
        for (metric, labels), value in self._values:
            families[metric].add_metric(labels, value)
        return list(families.values())


def _families() -> dict[str, Family]:
    kinds: dict[str, Callable[..., Family]] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    return {name: kinds[one.kind](name, one.help, labels=one.labels) for name, one in METRICS.items()}


_registered: ValuesCollector | None = None


def _register(collector: ValuesCollector) -> None:
    """Registers the collector in the place of that of an earlier engine of this process, as vLLM does with its own."""
    global _registered
    if _registered is not None:
        REGISTRY.unregister(_registered)
    REGISTRY.register(collector)
    _registered = collector


def _update(values: Iterable[tuple[Series, float]]) -> None:
    counted: dict[Series, float] = {}
    while True:
        count(values, counted)
        time.sleep(SECONDS)


def count(values: Iterable[tuple[Series, float]], counted: dict[Series, float]) -> None:
    """Adds to Prometheus' counters what has been added to the values since they were `counted`, and sets its gauges."""
    for series, value in values:
        metric, labels = series
        if METRICS[metric].kind == "gauge":
            _gauge(metric).labels(*labels).set(value)
        else:
            before = counted.get(series, 0.0)
            # An engine that has started again counts from zero.
            _counter(metric).labels(*labels).inc(value - before if value >= before else value)
            counted[series] = value


@cache
def _counter(name: str) -> Counter:
    return Counter(name, METRICS[name].help, METRICS[name].labels)


@cache
def _gauge(name: str) -> Gauge:
    return Gauge(name, METRICS[name].help, METRICS[name].labels, multiprocess_mode="mostrecent")
