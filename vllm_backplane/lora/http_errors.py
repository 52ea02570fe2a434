"""Answers a request with 400 and the reason if its LoRA adapter cannot be used, where vLLM answers 500.

vLLM's server answers 500 to every error of the engine while it loads an adapter, except when the folder does not exist.
Of the error it receives only the text. A worker that rejects an adapter therefore raises `AdapterRefused`, whose text
has a fixed form, and this ASGI middleware searches the response for that form.

A request fails without a reason if its adapter had to be loaded again and could not be. The middleware then makes
the engine load the adapter, and sends the engine's error as the response, or as the last event of a stream.
`platform.py` adds the middleware to vLLM's server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from vllm_backplane.errors import BackplaneError, short_repr
from vllm_backplane.http.asgi import App, Message, Receive, Send, error_body, send_error

PATHS = ("/v1/load_lora_adapter", "/adapters")
"""Path suffixes of the requests that load adapters: vLLM's, and SageMaker's."""

UNLOAD = "/v1/unload_lora_adapter"

_MESSAGE = "LoRA adapter {name} cannot be used: {reason} (correct the adapter, or load another)"
_GENERIC = "Internal server error"
"""vLLM's error message for a request that the engine ended with an error."""
_ERROR_EVENT = b'data: {"error"'
"""Prefix of an error event in vLLM's streams."""
_MESSAGE_PATTERN = re.compile(
    r"LoRA adapter .{1,1000}? cannot be used: .*?\(correct the adapter, or load another\)", re.DOTALL
)
"""Matches every text that `_MESSAGE` can produce, also inside a longer text."""


class AdapterRefused(BackplaneError):
    """Reports that an adapter does not fit the model or the options, or that its files are damaged."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(_MESSAGE.format(name=short_repr(name), reason=reason))


class AdapterErrors:
    """Replaces status 500 by 400 and the reason where a LoRA adapter is at fault, as ASGI middleware."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].endswith((*PATHS, UNLOAD)):
            await self._load(scope, receive, send)
        elif _has_type(b"application/json", scope) and (adapters := _served_adapters(scope)):
            await self._explain_failures(scope, receive, send, adapters)
        else:
            await self.app(scope, receive, send)

    async def _load(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves a request that loads or unloads an adapter, unless its texts cannot be sent back: vLLM repeats them in
        its response, and in those of later requests."""
        request_body: bytearray | None = bytearray()
        unusable: str | None = None

        async def receive_usable() -> Message:
            """Returns the client's next message, or a disconnect in the place of the last part of an unusable body.

            Only what the server reads is read: this middleware surrounds vLLM's authentication.
            """
            nonlocal request_body, unusable
            message = await receive()
            if request_body is None:
                return message
            request_body.extend(message.get("body", b""))
            if message.get("more_body", False):
                return message
            unusable = _unusable_text(bytes(request_body))
            request_body = None
            return {"type": "http.disconnect"} if unusable else message

        async def forward(message: Message) -> None:
            nonlocal request_body
            request_body = None  # the response has begun
            if not unusable:
                await send(message)

        try:
            await self._replace_failures(scope, receive_usable, forward, _find_refusal)
        except Exception:  # the server's, because of the disconnect
            if not unusable:
                raise
        if unusable:
            await send_error(send, 400, f"{unusable} is not text that can be encoded as UTF-8; choose another one")

    async def _explain_failures(
        self, scope: Message, receive: Receive, send: Send, adapters: Mapping[str, Any]
    ) -> None:
        """Serves a request that may use an adapter. If it fails without a reason, makes the engine load the adapter
        and sends the reason."""
        request_body: bytearray | None = bytearray()
        streamed_adapter: Any = None

        async def record_body() -> Message:
            message = await receive()
            if request_body is not None:
                request_body.extend(message.get("body", b""))
            return message

        async def forward(message: Message) -> None:
            nonlocal request_body, streamed_adapter
            if request_body is not None:
                # The response has begun, so the request body, which may be large, is dropped. A stream may still end
                # with an error.
                is_stream = _has_type(b"text/event-stream", message)
                streamed_adapter = adapters.get(_model(bytes(request_body))) if is_stream else None
                request_body = None
            elif streamed_adapter is not None and (body := message.get("body", b"")).startswith(_ERROR_EVENT):
                replacement = await find_reason(body.removeprefix(b"data: "), streamed_adapter)
                if replacement is not None:
                    message = {**message, "body": b"data: " + error_body(*replacement) + b"\n\n"}
            await send(message)

        async def explain(body: bytes) -> tuple[int, str] | None:
            if request_body is None:
                return None
            return await find_reason(body, adapters.get(_model(bytes(request_body))))

        async def find_reason(body: bytes, adapter: Any) -> tuple[int, str] | None:
            engine = scope["app"].state.engine_client
            if adapter is None or engine.errored or _message(body) != _GENERIC:
                return None
            try:
                await engine.add_lora(adapter)
            except Exception as fault:  # this error becomes the response
                return _status_and_message(str(fault), adapter)
            return None  # the request failed for another reason, or the adapter is loadable again

        await self._replace_failures(scope, record_body, forward, explain)

    async def _replace_failures(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        find_replacement: Callable[[bytes], Awaitable[tuple[int, str] | None]],
    ) -> None:
        """Holds back a response with status 500 and sends the status and message of `find_replacement` instead, or the
        response unchanged if that returns None."""
        failed: Message | None = None
        body = b""

        async def hold_failures(message: Message) -> None:
            nonlocal failed, body
            if message["type"] == "http.response.start" and message["status"] == 500:
                failed = message
            elif failed is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    for part in _response(failed, body, await find_replacement(body)):
                        await send(part)

        await self.app(scope, receive, hold_failures)


def _unusable_text(body: bytes) -> str | None:
    """Returns the name and value of the first text in a JSON object that has lone surrogates, or None."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM answers it
    for name, value in given.items() if isinstance(given, dict) else ():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return f"{short_repr(name)!a}: {short_repr(value)!a}"
    return None


def _has_type(content_type: bytes, message: Message) -> bool:
    given = (value for key, value in message.get("headers", ()) if key.lower() == b"content-type")
    return any(one.split(b";")[0].strip().lower() == content_type for one in given)


def _served_adapters(scope: Message) -> Mapping[str, Any]:
    """Returns the server's adapters by name."""
    models = getattr(scope["app"].state, "openai_serving_models", None) if "app" in scope else None
    return getattr(models, "lora_requests", {})


async def _find_refusal(body: bytes) -> tuple[int, str] | None:
    """Returns 400 and the reason if the response to a request that loads an adapter contains an `AdapterRefused`."""
    refused = _MESSAGE_PATTERN.search(_message(body))
    return None if refused is None else (400, refused[0])


def _status_and_message(fault: str, adapter: Any) -> tuple[int, str]:
    """Returns the HTTP status and the message for an engine's error while it loads an adapter."""
    if (refused := _MESSAGE_PATTERN.search(fault)) is not None:
        return 400, refused[0]
    return 404 if f"No adapter found for {adapter.lora_path}" in fault else 500, fault


def _response(start: Message, body: bytes, replacement: tuple[int, str] | None) -> tuple[Message, Message]:
    """Returns the two ASGI messages of the response, with the status and message of `replacement` if there is one."""
    if replacement is not None:
        status, message = replacement
        body = error_body(status, message)
        headers = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
        start = {**start, "status": status, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
    return start, {"type": "http.response.body", "body": body}


def _model(body: bytes) -> str:
    try:
        return str(json.loads(body)["model"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
