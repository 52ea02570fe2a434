"""Tests what is collected about a server that is ready, with applications of the kind that vLLM makes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from vllm_backplane.http.asgi import App, Message, Receive, Send
from vllm_backplane.http.served_addresses import served_facts

ARGUMENTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 8000,
    "uds": None,
    "root_path": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "api_key": None,
    "served_model_name": None,
    "model": "/srv/model",
    "chat_template": None,
}


class Engine:
    """A client of an engine, whose tokenizer has a chat template or not, or does not exist."""

    def __init__(self, template: str | None = "{{ messages }}", *, tokenizer: bool = True) -> None:
        self._template, self._exists = template, tokenizer

    def get_tokenizer(self) -> Any:
        if not self._exists:
            raise ValueError("no tokenizer")
        return SimpleNamespace(chat_template=self._template)


class AsynchronousEngine(Engine):
    async def get_tokenizer(self) -> Any:
        return super().get_tokenizer()


def nothing() -> dict[str, str]:
    return {}


def application(*paths: str, **arguments: Any) -> FastAPI:
    app = FastAPI()
    app.state.args = SimpleNamespace(**{**ARGUMENTS, **arguments})
    for path in paths:
        app.post(path)(nothing)
    return app


def facts(app: FastAPI, engine: Engine | None = None) -> dict[str, Any]:
    return asyncio.run(served_facts(app, engine or Engine()))


@pytest.fixture(autouse=True)
def without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        (Engine(), "/v1/chat/completions"),
        (AsynchronousEngine(), "/v1/chat/completions"),
        (Engine(None), "/v1/completions"),
        (Engine(tokenizer=False), "/v1/completions"),
    ],
)
def test_a_request_suits_the_model(engine: Engine, path: str) -> None:
    app = application("/v1/chat/completions", "/v1/completions", "/metrics")
    found = facts(app, engine)
    assert found["path"] == path
    assert found["metrics"]
    assert facts(application("/v1/chat/completions", chat_template="t"), Engine(None))["path"] == "/v1/chat/completions"
    assert facts(application("/v1/embeddings"))["path"] == "/v1/embeddings"
    assert facts(application("/classify"))["path"] is None


@pytest.mark.parametrize(
    ("given", "name"), [(None, "/srv/model"), (["a", "b"], "a"), ("a", "a")], ids=["none", "list", "one"]
)
def test_the_name_is_one_that_requests_can_use(given: Any, name: str) -> None:
    assert facts(application(served_model_name=given))["model"] == name


def test_a_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(application())["key"] is None
    assert facts(application(api_key=["secret"]))["key"] == "YOUR_API_KEY"
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert facts(application())["key"] == "$VLLM_API_KEY"


def test_tls_needs_key_and_certificate() -> None:
    assert facts(application(ssl_keyfile="k", ssl_certfile="c"))["tls"]
    assert not facts(application(ssl_keyfile="k"))["tls"]


class Page:
    """A middleware that provides a page."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/":
            await HTMLResponse("<p>")(scope, receive, send)  # type: ignore[arg-type]
        else:
            await self._app(scope, receive, send)


def test_a_page_is_found_whatever_provides_it() -> None:
    assert not facts(application("/"))["page"], "only requests with POST are answered"
    with_route, with_middleware, with_data = application(), application(), application()
    with_route.get("/", response_class=HTMLResponse)(lambda: "<p>")
    with_middleware.add_middleware(Page)  # type: ignore[arg-type]
    with_data.get("/")(nothing)
    assert facts(with_route)["page"]
    assert facts(with_middleware)["page"]
    assert not facts(with_data)["page"]
