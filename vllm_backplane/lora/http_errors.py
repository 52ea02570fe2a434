"""A LoRA adapter that cannot be used is the request's fault: 400 and the reason, where vLLM's server says 500.

vLLM's server answers 500 to everything that goes wrong in the engine while it loads an adapter, except to a folder that
is not there; of the error it has the text alone. So a worker that refuses an adapter does so in words that are known
here (`AdapterRefused`), and a middleware finds them in the answer. A request whose adapter had to be loaded again, and
could not be, ends with an error without a reason: then the engine is told to load it, and what it says is the answer,
or the last event of a stream. `middleware.py` brings it there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from vllm_backplane.errors import BackplaneError
from vllm_backplane.http.asgi import App, Message, Receive, Send, error_body

PATHS = ("/v1/load_lora_adapter", "/adapters")
"""Where adapters are loaded: vLLM's own, and SageMaker's."""

_WORDS = "LoRA adapter {name!r} cannot be used: {reason} (correct the adapter, or load another)"
_GENERIC = "Internal server error"
"""All that vLLM says of a request that ended with an error."""
_EVENT = b'data: {"error"'
"""How vLLM's event with an error begins."""
_FOUND = re.compile(r"LoRA adapter .{1,1000}? cannot be used: .*?\(correct the adapter, or load another\)", re.DOTALL)


class AdapterRefused(BackplaneError):
    """An adapter that does not fit the model or the options, or whose files are damaged."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(_WORDS.format(name=name, reason=reason))


class AdapterErrors:
    """ASGI middleware."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].endswith(PATHS):
            await self._look_at_failures(scope, receive, send, _refusal)
        elif _is(b"application/json", scope) and (adapters := _served(scope)):
            await self._explain_failures(scope, receive, send, adapters)
        else:
            await self.app(scope, receive, send)

    async def _explain_failures(
        self, scope: Message, receive: Receive, send: Send, adapters: Mapping[str, Any]
    ) -> None:
        """Of requests that ask for an adapter: whether it can be loaded (again) is what the engine is asked then."""
        asked: bytearray | None = bytearray()
        streams: Any = None

        async def keep() -> Message:
            message = await receive()
            if asked is not None:
                asked.extend(message.get("body", b""))
            return message

        async def pass_on(message: Message) -> None:
            nonlocal asked, streams
            if asked is not None:  # what is answered is decided; a stream may still end with an error
                streams = adapters.get(_model(bytes(asked))) if _is(b"text/event-stream", message) else None
                asked = None
            elif streams is not None and (body := message.get("body", b"")).startswith(_EVENT):
                judged = await reason(body.removeprefix(b"data: "), streams)
                if judged is not None:
                    message = {**message, "body": b"data: " + error_body(*judged) + b"\n\n"}
            await send(message)

        async def explain(body: bytes) -> tuple[int, str] | None:
            return None if asked is None else await reason(body, adapters.get(_model(bytes(asked))))

        async def reason(body: bytes, request: Any) -> tuple[int, str] | None:
            engine = scope["app"].state.engine_client
            if request is None or engine.errored or _message(body) != _GENERIC:
                return None
            try:
                await engine.add_lora(request)
            except Exception as fault:  # it is the answer
                return _told(str(fault), request)
            return None  # the fault is another, or is mended

        await self._look_at_failures(scope, keep, pass_on, explain)

    async def _look_at_failures(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        judge: Callable[[bytes], Awaitable[tuple[int, str] | None]],
    ) -> None:
        """What `judge` makes of a 500: another status and a message, or nothing."""
        failed: Message | None = None
        body = b""

        async def look(message: Message) -> None:
            nonlocal failed, body
            if message["type"] == "http.response.start" and message["status"] == 500:
                failed = message
            elif failed is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    for part in _answer(failed, body, await judge(body)):
                        await send(part)

        await self.app(scope, receive, look)


def _is(kind: bytes, message: Message) -> bool:
    stated = (value for key, value in message.get("headers", ()) if key.lower() == b"content-type")
    return any(one.split(b";")[0].strip().lower() == kind for one in stated)


def _served(scope: Message) -> Mapping[str, Any]:
    """The adapters that the server knows by name."""
    models = getattr(scope["app"].state, "openai_serving_models", None) if "app" in scope else None
    return getattr(models, "lora_requests", {})


async def _refusal(body: bytes) -> tuple[int, str] | None:
    """In the answer to a request that was to load an adapter."""
    refused = _FOUND.search(_message(body))
    return None if refused is None else (400, refused[0])


def _told(fault: str, request: Any) -> tuple[int, str]:
    if (refused := _FOUND.search(fault)) is not None:
        return 400, refused[0]
    return 404 if f"No adapter found for {request.lora_path}" in fault else 500, fault


def _answer(start: Message, body: bytes, judged: tuple[int, str] | None) -> tuple[Message, Message]:
    """The answer as it is, or another that names the reason."""
    if judged is not None:
        status, message = judged
        body = error_body(status, message)
        headers = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
        start = {**start, "status": status, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
    return start, {"type": "http.response.body", "body": body}


def _model(body: bytes) -> str:
    try:
        return str(json.loads(body)["model"])
    except (ValueError, KeyError, TypeError):
        return ""


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
