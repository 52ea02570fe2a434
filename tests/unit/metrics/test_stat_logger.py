"""Tests the stat logger and its entry point, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests import programs
from tests.environment import AT_START
from vllm_backplane.errors import BackplaneError
from vllm_backplane.metrics import entry_point, folder, series
from vllm_backplane.metrics.values_file import ValuesFile


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "private_folder", lambda: tmp_path)


@pytest.fixture(autouse=True)
def not_offered() -> Iterator[None]:
    """Withdraws the entry point, which a configuration of another test in this process may have offered."""
    entry_point.offer(False)
    yield
    entry_point.offer(False)


@pytest.fixture
def values() -> Any:
    from vllm_backplane.metrics.stat_logger import Values

    return Values


def points() -> list[str]:
    return [point.value for point in entry_points(group=entry_point.GROUP) if point.name == entry_point.NAME]


def test_the_entry_point_is_found_where_it_is_offered_alone() -> None:
    assert points() == []
    entry_point.offer(True)
    entry_point.offer(True)
    assert points() == [entry_point.LOGGER]
    assert distribution("vllm-backplane-stat-logger").version == "0"
    assert distribution("vllm-backplane").version != "0"
    entry_point.offer(False)
    assert points() == []


def test_vllm_loads_the_class() -> None:
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    from vllm_backplane.metrics.stat_logger import BackplaneStatLogger

    before = load_stat_logger_plugin_factories()
    entry_point.offer(True)
    assert set(load_stat_logger_plugin_factories()) - set(before) == {BackplaneStatLogger}


def text(values: Any) -> str:
    from vllm_backplane.metrics.stat_logger import ValuesCollector

    registry = CollectorRegistry(auto_describe=True)
    registry.register(ValuesCollector(values))
    return generate_latest(registry).decode()


def test_values_of_all_processes_are_shown(values: Any) -> None:
    name = folder.create()
    at = folder.existing(name)
    assert at is not None
    worker = ValuesFile(
        at / "worker-0",
        [
            (series.STEPS, ("0", "eager", "not captured")),
            (series.OPERATOR_SECONDS, ("0", "linear")),
            (series.OPERATOR_SECONDS, ("0", "logits")),
        ],
    )
    worker.values[0], worker.values[1] = 3, 0.5
    worker.save()
    ValuesFile(at / "worker-1", [(series.GRAPHS, ("1",))])
    shown = text(values(name))
    assert 'backplane:steps_total{mode="eager",rank="0",reason="not captured"} 3.0' in shown
    assert 'backplane:operator_seconds_total{operator="linear",rank="0"} 0.5' in shown
    assert "logits" not in shown
    assert 'backplane:graphs_captured{rank="1"} 0.0' in shown
    assert "# TYPE backplane:steps_total counter" in shown
    worker.remove()
    assert 'rank="0"' not in text(values(name))


def test_an_unreadable_file_is_reported_once_and_the_others_are_shown(
    values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_backplane.metrics import stat_logger

    errors: list[str] = []
    monkeypatch.setattr(stat_logger.logger, "error", lambda text, *values: errors.append(text % values))
    name = folder.create()
    at = folder.existing(name)
    assert at is not None
    (at / "worker-0").write_bytes(b"x")
    ValuesFile(at / "worker-1", [(series.GRAPHS, ("1",))])
    read = values(name)
    for _ in range(2):
        assert list(read) == [((series.GRAPHS, ("1",)), 0.0)]
    [error] = errors
    assert "worker-0 has no metrics of this release" in error


def test_a_folder_that_cannot_be_listed_is_reported_once_and_the_rest_of_metrics_is_shown(
    values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_backplane.metrics import stat_logger

    errors: list[str] = []
    monkeypatch.setattr(stat_logger.logger, "error", lambda text, *values: errors.append(text % values))

    def fail() -> Path:
        raise BackplaneError("others may write in it")

    monkeypatch.setattr(folder, "private_folder", fail)
    read = values("1-0")
    assert list(read) == list(read) == []
    assert "# TYPE backplane:steps_total counter" in text(read)
    [error] = errors
    assert "others may write in it" in error


def test_a_server_starts_without_metrics_where_no_folder_can_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_backplane.config import stages

    def fail() -> Path:
        raise BackplaneError("others may write in it")

    errors: list[str] = []
    monkeypatch.setattr(stages.logger, "error", lambda text, *values: errors.append(text % values))
    monkeypatch.setattr(folder, "private_folder", fail)
    state = SimpleNamespace(explicit_arguments={"disable_log_stats": False}, metrics_folder=None)
    monkeypatch.setattr(stages, "state_of", lambda _config: state)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=1, _api_process_rank=0))
    chosen: Any = SimpleNamespace(setting=lambda _name: True)
    stages.set_metrics(config, chosen)
    assert state.metrics_folder is None
    assert points() == []
    assert errors == ["/metrics has no metrics of Backplane: others may write in it"]


def test_counters_with_several_api_servers_count_what_was_added() -> None:
    from prometheus_client import REGISTRY

    from vllm_backplane.metrics import stat_logger

    steps, graphs = (series.STEPS, ("9", "eager", "prefill")), (series.GRAPHS, ("9",))
    labels = {"rank": "9", "mode": "eager", "reason": "prefill"}
    try:
        counted: dict[series.Series, float] = {}
        for value in (2.0, 5.0, 5.0, 1.0, 4.0):  # an engine that starts again counts from zero
            stat_logger.count([(steps, value), (graphs, value)], counted)
        assert REGISTRY.get_sample_value(series.STEPS, labels) == 9
        assert REGISTRY.get_sample_value(series.GRAPHS, {"rank": "9"}) == 4
    finally:
        REGISTRY.unregister(stat_logger._counter(series.STEPS))
        REGISTRY.unregister(stat_logger._gauge(series.GRAPHS))
        stat_logger._counter.cache_clear()
        stat_logger._gauge.cache_clear()


INERT = """
import os, sys
import prometheus_client
from importlib.metadata import entry_points
from types import SimpleNamespace
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

current_platform.device_type
load_general_plugins()
assert load_stat_logger_plugin_factories() == []
assert not getattr(type(current_platform), "is_backplane", False)
assert [point for point in entry_points(group="vllm.stat_logger_plugins") if "backplane" in point.value] == []
from vllm_backplane.metrics.stat_logger import BackplaneStatLogger
before = list(prometheus_client.REGISTRY._collector_to_names)
logger = BackplaneStatLogger(SimpleNamespace(), [0])
logger.record(None, None)
logger.log_engine_initialized()
logger.log()
assert list(prometheus_client.REGISTRY._collector_to_names) == before
print("inert", os.listdir(sys.argv[1]))
"""


@pytest.mark.process
def test_it_does_nothing_under_another_platform(tmp_path: Path) -> None:
    """Tests also that vLLM finds no stat logger there: it would ignore --disable-log-stats if it found one."""
    kept = {name: value for name, value in AT_START.items() if not name.startswith(("BACKPLANE_", "VLLM_"))}
    own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu", "TMPDIR": str(tmp_path)}
    done = programs.run(programs.command(INERT, str(tmp_path)), env={**kept, **own}, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inert" in done.stdout
    assert not any("vllm-backplane" in path.name for path in tmp_path.iterdir())
