"""Collects what a client must know to reach a server: its address, its paths, and whether it wants a key or TLS."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from vllm_backplane.http.asgi import App, Message

KEY_VARIABLE = "VLLM_API_KEY"
PAGE = "/"
METRICS = "/metrics"
_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


async def served_facts(app: Any, engine: Any) -> dict[str, str | int | bool | None]:
    """Returns the facts about a server of vLLM: `app` is its application, and `engine` its client of the engine."""
    args = app.state.args
    paths = {getattr(route, "path", None) for route in app.routes}
    return {
        "host": args.host,
        "port": args.port,
        "uds": args.uds,
        "root_path": args.root_path,
        "tls": bool(args.ssl_keyfile and args.ssl_certfile) or None,
        "key": _key(args),
        "model": _served_name(args),
        "path": await _path(paths, args, engine),
        "metrics": METRICS in paths or None,
        "page": await serves_page(app) or None,
    }


def _key(args: Any) -> str | None:
    """Returns what stands for the API key in a command line, or None if the server needs no key. The key itself must
    not be on a terminal."""
    if any(args.api_key or ()):
        return "YOUR_API_KEY"
    return f"${KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else None


def _served_name(args: Any) -> str:
    given = args.served_model_name or args.model
    return str(given if isinstance(given, str) else given[0])


async def _path(paths: set[str | None], args: Any, engine: Any) -> str | None:
    """Returns the path of the request that suits the model best."""
    if _CHAT in paths and (args.chat_template or await _has_chat_template(engine)):
        return _CHAT
    return next((path for path in (_COMPLETIONS, _EMBEDDINGS) if path in paths), None)


async def _has_chat_template(engine: Any) -> bool:
    try:
        found = engine.get_tokenizer()
        tokenizer = await found if inspect.isawaitable(found) else found
    except ValueError:  # --skip-tokenizer-init
        return False
    return bool(getattr(tokenizer, "chat_template", None))


async def serves_page(app: App) -> bool:
    """Returns whether a browser gets a page at the address of the server. A route or a middleware may provide it, so
    the application is asked."""
    found: dict[str, Any] = {}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Mapping[bytes, bytes] = {name.lower(): value for name, value in message["headers"]}
            found.update(status=message["status"], kind=headers.get(b"content-type", b""))

    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": PAGE,
        "raw_path": PAGE.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"accept", b"text/html")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return found.get("status") == 200 and found["kind"].startswith(b"text/html")
