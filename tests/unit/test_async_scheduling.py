"""On a device without streams async scheduling is off unless a command line asks for it."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane import scheduling

WITHOUT_STREAMS: Any = SimpleNamespace(name="host", capabilities=SimpleNamespace(streams=False))
WITH_STREAMS: Any = SimpleNamespace(name="card", capabilities=SimpleNamespace(streams=True))


@pytest.fixture(autouse=True)
def no_command_line_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_stated", False)


def command_line(device: Any, *given: str) -> bool | None:
    """What vLLM makes of it: on where nothing is said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=None)
    scheduling.turn_default(parser, device)
    value: bool | None = parser.parse_args(given).async_scheduling
    return True if value is None else value


def settled(device: Any, value: bool | None, additional: Any = None) -> bool:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=value), additional_config=additional
    )
    scheduling.settle(config, device)
    return bool(config.scheduler_config.async_scheduling)


@pytest.mark.parametrize(
    ("given", "expected"), [((), False), (("--async-scheduling",), True), (("--no-async-scheduling",), False)]
)
def test_a_command_line_without_streams(given: tuple[str, ...], expected: bool) -> None:
    assert settled(WITHOUT_STREAMS, command_line(WITHOUT_STREAMS, *given), {}) is expected


@pytest.mark.parametrize(
    ("given", "expected"), [((), True), (("--async-scheduling",), True), (("--no-async-scheduling",), False)]
)
def test_a_command_line_with_streams(given: tuple[str, ...], expected: bool) -> None:
    assert settled(WITH_STREAMS, command_line(WITH_STREAMS, *given), {}) is expected


def test_without_a_command_line_it_is_off() -> None:
    assert settled(WITHOUT_STREAMS, True, {}) is False


def test_another_process_keeps_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    carried: dict[str, Any] = {}
    assert settled(WITHOUT_STREAMS, command_line(WITHOUT_STREAMS, "--async-scheduling"), carried)
    monkeypatch.setattr(scheduling, "_stated", False)
    assert settled(WITHOUT_STREAMS, True, carried)
