"""On a device without streams async scheduling is off unless somebody asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane import scheduling
from vllm_backplane.stated_options import with_note

WITHOUT_STREAMS: Any = SimpleNamespace(name="host", capabilities=SimpleNamespace(streams=False))
WITH_STREAMS: Any = SimpleNamespace(name="card", capabilities=SimpleNamespace(streams=True))


def settled(device: Any, said: bool | None, additional: Any) -> bool:
    """vLLM makes it on where nothing is said."""
    value = True if said is None else said
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=value), additional_config=additional
    )
    scheduling.settle(config, device)
    return bool(config.scheduler_config.async_scheduling)


def noted(said: bool | None) -> Any:
    return with_note({}, SimpleNamespace(async_scheduling=said, enable_prefix_caching=None))


@pytest.mark.parametrize(("said", "expected"), [(None, False), (True, True), (False, False)])
def test_without_streams(said: bool | None, expected: bool) -> None:
    assert settled(WITHOUT_STREAMS, said, noted(said)) is expected


@pytest.mark.parametrize(("said", "expected"), [(None, True), (True, True), (False, False)])
def test_with_streams(said: bool | None, expected: bool) -> None:
    assert settled(WITH_STREAMS, said, noted(said)) is expected


@pytest.mark.parametrize("additional", [{}, None], ids=["no note", "no dictionary"])
def test_where_nothing_is_noted_it_is_off(additional: Any) -> None:
    assert settled(WITHOUT_STREAMS, None, additional) is False
