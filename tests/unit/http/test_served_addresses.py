"""Tests what is collected about a server that is ready, with applications of the kind that vLLM makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette

from vllm_backplane.http import served_addresses
from vllm_backplane.http.asgi import App, Message, Receive, Send
from vllm_backplane.http.served_addresses import served_facts
from vllm_backplane.patches.platform.patch_launcher import _announce
from vllm_backplane.process import start_events

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
    """Stands in for a client of an engine, whose tokenizer has a chat template or not, or does not exist."""

    def __init__(self, template: str | None = "{{ messages }}", *, tokenizer: bool = True) -> None:
        self._template, self._exists = template, tokenizer
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=204480))

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
    found = facts(application("/v1/chat/completions", "/v1/completions"), engine)
    assert found["path"] == path
    assert found["kv_cache_tokens"] == 204480
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


def test_tls_needs_a_certificate() -> None:
    assert facts(application(ssl_keyfile="k", ssl_certfile="c"))["tls"]
    assert facts(application(ssl_certfile="key and certificate"))["tls"]
    assert not facts(application())["tls"]


class Middleware:
    """Records the requests, as a middleware."""

    seen: list[str]

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.seen.append(scope["type"])
        await self._app(scope, receive, send)


def test_a_page_is_found_whatever_provides_it() -> None:
    with_route, with_mount, with_middleware = application(), application(), application()
    with_route.get("/")(nothing)
    with_mount.mount("/", Starlette())
    with_middleware.state.backplane_page = True
    for app in (with_route, with_mount, with_middleware):
        assert facts(app)["page"]
    assert not facts(application("/"))["page"], "only requests with POST are answered"
    elsewhere = application()
    elsewhere.mount("/static", Starlette())
    assert not facts(elsewhere)["page"]


def test_no_request_is_made() -> None:
    """A middleware would count it, and a response without an end would keep the server busy."""
    Middleware.seen = []

    async def pieces() -> AsyncIterator[bytes]:
        Middleware.seen.append("piece")
        while True:
            yield b"one"
            await asyncio.sleep(0)

    app = application("/metrics")
    app.get("/")(lambda: StreamingResponse(pieces()))
    app.add_middleware(Middleware)  # type: ignore[arg-type]
    assert facts(app)["page"]
    assert Middleware.seen == []


class Broken(Engine):
    """Stands in for a client of an engine whose tokenizer is not to be had, with an error that nobody expects."""

    def get_tokenizer(self) -> Any:
        raise RuntimeError("a tokenizer of somebody else")


class Slow(Engine):
    async def get_tokenizer(self) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("engine", [Broken(), Slow()])
def test_a_server_is_ready_even_if_something_about_it_is_not_known(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, vllm_log: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(served_addresses, "FACT_SECONDS", 0.05)
    monkeypatch.setenv(start_events.VARIABLE, '{"began": 0.0}')
    app = application("/v1/chat/completions", "/v1/completions")
    app.get("/metrics")(nothing)
    app.state.server = SimpleNamespace(started=True)
    asyncio.run(_announce(app, engine))
    failed, ready = vllm_log()
    assert "'path'" in failed
    assert ready.startswith("Start: step=ready ")
    assert ready.endswith("host=127.0.0.1 port=8000 model=/srv/model metrics=true kv_cache_tokens=204480")
