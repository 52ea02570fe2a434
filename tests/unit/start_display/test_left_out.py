"""Tests which warnings are left out, and that each of them is still one of the installed vLLM."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from vllm_backplane.process.start_events import VARIABLE
from vllm_backplane.start_display import left_out
from vllm_backplane.start_display.left_out import DETAILS, WARNINGS, concerns_user
from vllm_backplane.start_display.log_lines import Message

PACKAGES = Path(str(find_spec("vllm").origin)).parents[1]  # type: ignore[union-attr]


def source_of(module: str) -> str:
    """Returns a module's source with the parts of its strings joined."""
    text = PACKAGES.joinpath(*module.split(".")).with_suffix(".py").read_text()
    return re.sub(r'"\s*\n?\s*f?"', "", text)


@pytest.mark.parametrize("one", WARNINGS, ids=lambda one: one.pattern[:30])
def test_the_module_issues_the_warning(one: left_out.LeftOut) -> None:
    before_values = re.split(r"vllm_backplane|\\d", one.pattern)[0]
    assert before_values in source_of(one.module)


@pytest.mark.parametrize(("module", "beginning"), DETAILS)
def test_the_module_logs_the_details(module: str, beginning: str) -> None:
    assert beginning in source_of(module)


def test_a_low_limit_of_files_concerns_the_user() -> None:
    text = "Found ulimit of {} and failed to automatically increase with error current limit exceeds maximum limit."
    assert concerns_user(Message("WARNING", text.format(1024)))
    assert not concerns_user(Message("WARNING", text.format(20000)))


def test_errors_and_other_warnings_concern_the_user() -> None:
    assert concerns_user(Message("ERROR", "Inductor compilation was disabled by user settings"))
    assert concerns_user(Message("WARNING", "the swap space is full", category="UserWarning"))
    assert not concerns_user(Message("WARNING", "`a` is deprecated", category="FutureWarning"))
    assert not concerns_user(Message("WARNING", "The given buffer is not writable, and", category="UserWarning"))


@pytest.fixture
def loggers() -> Iterator[None]:
    """Removes the filters that a test installs."""
    names = {one.module for one in WARNINGS} | {name for name, _beginning in DETAILS}
    level = logging.getLogger("vllm").level
    with warnings.catch_warnings():
        yield
    for name in names:
        logging.getLogger(name).filters.clear()
    logging.getLogger("vllm").setLevel(level)
    left_out.install_filters.cache_clear()


@pytest.mark.parametrize("filters", [True, False])
def test_filters_lower_details_and_drop_warnings(loggers: None, monkeypatch: pytest.MonkeyPatch, filters: bool) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"began": 0.0, "filters": filters}))
    left_out.install_filters.cache_clear()
    left_out.install_filters()
    handler = BufferingHandler(100)
    root = logging.getLogger("vllm")
    monkeypatch.setattr(root, "propagate", False)
    monkeypatch.setattr(root, "handlers", [handler])
    root.setLevel(logging.DEBUG)
    launcher, config = logging.getLogger("vllm.entrypoints.launchers.launcher"), logging.getLogger("vllm.config.vllm")
    launcher.info("Route: %s, Methods: %s", "/health", "GET")
    launcher.warning("port %s is used", 8000)
    config.warning("Inductor compilation was disabled by user settings, so")
    config.warning("Async scheduling is off")
    found = [(record.levelname, record.getMessage()) for record in handler.buffer]
    assert found[0] == ("DEBUG" if filters else "INFO", "Route: /health, Methods: GET")
    assert [text for _level, text in found[1:]] == [
        "port 8000 is used",
        *([] if filters else ["Inductor compilation was disabled by user settings, so"]),
        "Async scheduling is off",
    ]
