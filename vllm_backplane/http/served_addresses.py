"""Collects what a client must know to reach a server: its address, its paths, and whether it wants a key or TLS."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

logger = logging.getLogger("vllm." + __name__)

KEY_VARIABLE = "VLLM_API_KEY"
FACT_SECONDS = 5.0
"""Seconds after which a fact counts as unknown."""
Fact = str | int | bool | None
CHAT, COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


async def served_facts(app: Any, engine: Any) -> dict[str, Fact]:
    """Returns the facts about a server of vLLM: `app` is its application, and `engine` its client of the engine.

    The server is up. What cannot be found out is logged, and left out.
    """
    args = app.state.args
    facts: dict[str, Fact] = {
        "host": args.host,
        "port": args.port,
        "uds": args.uds,
        "root_path": args.root_path,
        "tls": bool(args.ssl_certfile) or None,  # the file may have the key too
        "key": _key(args),
        "model": _served_name(args),
    }
    for name, find in _LOOKED_UP.items():
        try:
            facts[name] = await asyncio.wait_for(find(app, engine), FACT_SECONDS)
        except Exception:
            logger.warning(
                "The server is up. The fact %r about it is not known, because of an error.", name, exc_info=True
            )
    return facts


def _key(args: Any) -> str | None:
    """Returns what stands for the API key in a command line, or None if the server needs no key. The key itself must
    not be on a terminal."""
    if any(args.api_key or ()):
        return "YOUR_API_KEY"
    return f"${KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else None


def _served_name(args: Any) -> str:
    given = args.served_model_name or args.model
    return str(given if isinstance(given, str) else given[0])


async def path_of_request(app: Any, engine: Any) -> Fact:
    """Returns the path of the request that suits the model best."""
    paths = {getattr(route, "path", None) for route in app.routes}
    if CHAT in paths and (app.state.args.chat_template or await _has_chat_template(engine)):
        return CHAT
    return next((path for path in (COMPLETIONS, _EMBEDDINGS) if path in paths), None)


async def _has_chat_template(engine: Any) -> bool:
    try:
        found = engine.get_tokenizer()
        tokenizer = await found if inspect.isawaitable(found) else found
    except ValueError:  # --skip-tokenizer-init
        return False
    return bool(getattr(tokenizer, "chat_template", None))


async def _metrics(app: Any, _engine: Any) -> Fact:
    return answers(app, "/metrics") or None


async def _page(app: Any, _engine: Any) -> Fact:
    """Returns whether a browser gets something at the address of the server: from a route, or from a middleware that
    has set `backplane_page` in the state of the application."""
    return bool(getattr(app.state, "backplane_page", False)) or answers(app, "/") or None


def answers(app: Any, path: str, method: str = "GET") -> bool:
    """Returns whether a route or a mounted application answers requests at a path. No request is made: middlewares and
    metrics would count it as one of a client."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    return any(route.matches(scope)[0].name == "FULL" for route in app.routes)


async def _capacity(_app: Any, engine: Any) -> Fact:
    """Returns the tokens in the KV cache. vLLM has the number since 0.33."""
    return getattr(engine.vllm_config.cache_config, "kv_cache_size_tokens", None)


_LOOKED_UP: Mapping[str, Callable[[Any, Any], Awaitable[Fact]]] = {
    "path": path_of_request,
    "metrics": _metrics,
    "page": _page,
    "kv_cache_tokens": _capacity,
}
"""Facts that depend on more than the arguments, and on code of others: middlewares, plugins, tokenizers."""
