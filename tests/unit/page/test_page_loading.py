"""Tests which servers get the page: what `serve` adds to vLLM's command line, and what vLLM's warning has of it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import vllm_backplane
from vllm_backplane.errors import UsageError
from vllm_backplane.page import loading, plugin
from vllm_backplane.page.loading import ENTRY_POINT, MIDDLEWARE, arguments_of_serve
from vllm_backplane.page.plugin import PageLoader


def test_serve_adds_the_page_unless_it_is_not_wanted() -> None:
    assert arguments_of_serve({}, wanted=True) == ["--middleware", MIDDLEWARE]
    assert f"{PageLoader.__module__}.{PageLoader.__name__}" == MIDDLEWARE
    assert arguments_of_serve({}, wanted=False) == []


@pytest.mark.parametrize("allowed", ["backplane", "backplane,backplane_page", ""])
def test_a_list_of_plugins_decides_alone(allowed: str) -> None:
    """Tests that vLLM loads the page once if it is named, and that the command does not add what is not named."""
    assert arguments_of_serve({"VLLM_PLUGINS": allowed}, wanted=True) == []


def test_a_list_of_plugins_with_the_page_contradicts_the_option() -> None:
    for allowed in ({}, {"VLLM_PLUGINS": "backplane"}):
        loading.refuse_named_page(allowed)
    with pytest.raises(UsageError, match="--no-page contradicts VLLM_PLUGINS=backplane,backplane_page; remove"):
        loading.refuse_named_page({"VLLM_PLUGINS": "backplane,backplane_page"})


def test_no_other_plugin_has_the_name_of_the_page() -> None:
    """VLLM_PLUGINS=backplane asks for the platform, and must not open paths of the HTTP server."""
    [point] = [one for one in entry_points(name=ENTRY_POINT) if one.group.startswith("vllm.")]
    assert point.group == "vllm.endpoint_plugins"
    assert point.load() is vllm_backplane.register_page


def logged(*names: str) -> list[str]:
    """Returns what vLLM would log of these endpoint plugins, with the filter installed."""
    from vllm import plugins

    [text] = re.findall(r"logger\.warning\(\s*((?:\"[^\"]*\"\s*)+),", inspect.getsource(plugins.load_endpoint_plugins))
    message = "".join(re.findall(r'"([^"]*)"', text))
    record = logging.LogRecord("vllm.plugins", logging.WARNING, "", 0, message, (list(names),), None)
    loading.keep_out_of_warning()
    loading.keep_out_of_warning()
    logger = logging.getLogger("vllm.plugins")
    return [record.getMessage()] if logger.filter(record) else []


def test_who_has_only_installed_us_is_not_warned_of_the_page() -> None:
    assert logged(ENTRY_POINT) == []


def test_every_process_keeps_the_page_out_of_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests the general plugin, which vLLM calls before it looks for endpoint plugins, whatever the platform is."""
    logger = logging.getLogger("vllm.plugins")
    logger.removeFilter(loading._FILTER)
    monkeypatch.setattr("vllm_backplane.plugin.activate", lambda: None)
    vllm_backplane.register_general()
    assert logger.filters == [loading._FILTER]


def test_the_warning_of_other_plugins_stays_as_it_would_be_without_us() -> None:
    [line] = logged("theirs", ENTRY_POINT)
    assert line.startswith("Found endpoint plugin(s) ['theirs'] but VLLM_PLUGINS is not set.")
    assert logged("theirs") == [line]


def test_other_lines_of_that_logger_are_kept() -> None:
    loading.keep_out_of_warning()
    logger = logging.getLogger("vllm.plugins")
    for message, arguments in (("Loaded endpoint plugin %s", (ENTRY_POINT,)), ("nothing", ())):
        record = logging.LogRecord("vllm.plugins", logging.WARNING, "", 0, message, arguments, None)
        assert logger.filter(record)


def test_the_middleware_attaches_the_plugin_when_the_application_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def facts(app: Any, engine: Any, _args: Any) -> dict[str, Any]:
        return {"engine": engine, "unknown": []}

    monkeypatch.setattr(plugin, "current_platform", type("Platform", (), {"is_backplane": True})())
    monkeypatch.setattr(plugin, "server_facts", facts)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    app = FastAPI()
    app.get("/health")(lambda: "fine")
    app.state.args = SimpleNamespace(api_key=None)
    app.state.engine_client = "the engine"
    app.add_middleware(PageLoader)  # type: ignore[arg-type]
    with TestClient(app) as browser:
        assert browser.get("/").text.startswith("<!doctype html>")
        assert browser.get("/backplane/status").json()["facts"]["engine"] == "the engine"
        assert browser.get("/health").json() == "fine"


def test_an_error_of_the_page_does_not_end_the_start_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def facts(_app: Any, _engine: Any, _args: Any) -> dict[str, Any]:
        raise OSError("no such file")

    errors: list[str] = []
    monkeypatch.setattr(plugin.logger, "exception", errors.append)
    monkeypatch.setattr(plugin, "current_platform", type("Platform", (), {"is_backplane": True})())
    monkeypatch.setattr(plugin, "server_facts", facts)
    started = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        started.append(True)
        yield

    app = FastAPI(lifespan=lifespan)
    app.get("/health")(lambda: "fine")
    app.state.args = SimpleNamespace(api_key=None)
    app.state.engine_client = "the engine"
    app.add_middleware(PageLoader)  # type: ignore[arg-type]
    with TestClient(app) as browser:
        assert browser.get("/health").json() == "fine"
    assert started == [True]
    assert errors == ["The page of Backplane is not served, because of an error."]


def test_a_warning_of_another_form_stays() -> None:
    loading.keep_out_of_warning()
    logger = logging.getLogger("vllm.plugins")
    record = logging.LogRecord("vllm.plugins", logging.WARNING, "", 0, loading.NOT_LOADED + "%s", ("a", "b"), None)
    assert logger.filter(record)


def test_requests_pass_the_middleware_as_they_are() -> None:
    seen: list[Any] = []

    async def app(*message: Any) -> None:
        seen.append(message)

    message = {"type": "http"}, None, None
    asyncio.run(PageLoader(app)(*message))  # type: ignore[arg-type]
    assert seen == [message]
