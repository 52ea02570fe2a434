"""Tests that async scheduling is off on a device without streams unless the user requests it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.config import scheduling
from vllm_backplane.settings.explicit_arguments import record

WITHOUT_STREAMS: Any = SimpleNamespace(name="host", capabilities=SimpleNamespace(streams=False))
WITH_STREAMS: Any = SimpleNamespace(name="card", capabilities=SimpleNamespace(streams=True))


def settled(device: Any, explicit: bool | None) -> bool:
    """Returns the resulting setting of async scheduling, which is on by default in vLLM."""
    record(SimpleNamespace(async_scheduling=explicit, enable_prefix_caching=None))
    value = True if explicit is None else explicit
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=value))
    scheduling.set_async_scheduling(config, device)
    return bool(config.scheduler_config.async_scheduling)


@pytest.mark.parametrize(("explicit", "expected"), [(None, False), (True, True), (False, False)])
def test_without_streams(explicit: bool | None, expected: bool) -> None:
    assert settled(WITHOUT_STREAMS, explicit) is expected


@pytest.mark.parametrize(("explicit", "expected"), [(None, True), (True, True), (False, False)])
def test_with_streams(explicit: bool | None, expected: bool) -> None:
    assert settled(WITH_STREAMS, explicit) is expected
