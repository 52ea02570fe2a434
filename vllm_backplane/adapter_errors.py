"""A LoRA adapter that cannot be used is the request's fault: 400 and the reason, where vLLM's server says 500.

vLLM's server answers 500 to everything that goes wrong in the engine while it loads an adapter, except to a folder that
is not there; of the error it has the text alone. So a worker that refuses an adapter does so in words that are known
here (`AdapterRefused`), and a middleware finds them in the answer. `middleware.py` brings it there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_backplane.errors import BackplaneError

PATHS = ("/v1/load_lora_adapter", "/adapters")
"""Where adapters are loaded: vLLM's own, and SageMaker's."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_WORDS = "LoRA adapter {name!r} cannot be used: {reason} (correct the adapter, or load another)"
_FOUND = re.compile(r"LoRA adapter .{1,1000}? cannot be used: .*?\(correct the adapter, or load another\)", re.DOTALL)


class AdapterRefused(BackplaneError):
    """An adapter that does not fit the model or the options, or whose files are damaged."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(_WORDS.format(name=name, reason=reason))


class AdapterErrors:
    """ASGI middleware."""

    NAME = f"{__name__}.AdapterErrors"

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(PATHS):
            await self.app(scope, receive, send)
            return
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
                    for part in _answer(failed, body):
                        await send(part)

        await self.app(scope, receive, look)


def _answer(start: Message, body: bytes) -> tuple[Message, Message]:
    """The answer as it is, or a refusal that names the reason."""
    refused = _FOUND.search(_message(body))
    if refused is not None:
        error = {"message": refused[0], "type": "BadRequestError", "param": None, "code": 400}
        body = json.dumps({"error": error}).encode()
        headers = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
        start = {**start, "status": 400, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
    return start, {"type": "http.response.body", "body": body}


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
