"""Answers requests to /v1/responses with 400 if a message of the assistant among their inputs has no text.

vLLM reads the text of the first part of such a message, and fails with status 500 or an exception if there is no
part, or one without text. The middleware surrounds vLLM's authentication. It therefore reads nothing from a client
itself, and examines what vLLM has read when vLLM has failed.
"""

from __future__ import annotations

import json
from typing import Any

from vllm_backplane.http.asgi import App, Message, Receive, Send, send_error

PATH = "/v1/responses"


class MessageText:
    """Explains failures because of messages of the assistant without text, as ASGI middleware."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATH):
            await self.app(scope, receive, send)
            return
        request_body: bytearray | None = bytearray()
        is_answered = False

        async def record_body() -> Message:
            message = await receive()
            if request_body is not None:
                request_body.extend(message.get("body", b""))
            return message

        async def answer_fault() -> bool:
            """Answers with 400 if the request is at fault and the response has not begun. Returns whether it did."""
            nonlocal is_answered
            fault = fault_of(bytes(request_body)) if request_body is not None else ""
            if fault:
                is_answered = True
                await send_error(send, 400, fault)
            return is_answered

        async def forward(message: Message) -> None:
            nonlocal request_body
            if message["type"] == "http.response.start":
                if message["status"] == 500:
                    await answer_fault()
                request_body = None  # it may be large, and a stream may last for minutes
            if not is_answered:
                await send(message)

        try:
            await self.app(scope, record_body, forward)
        except Exception:  # Starlette answers it outside of all middlewares
            if not await answer_fault():
                raise


def fault_of(body: bytes) -> str:
    """Returns why the body of a request cannot be answered, or an empty text. vLLM reports what is not valid JSON."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    items = request.get("input") if isinstance(request, dict) else None
    for place, item in enumerate(items if isinstance(items, list) else []):
        if _is_output_message(item) and not _has_text(item["content"]):
            return f"input[{place}] is a message of the assistant without text; give it a text, or leave it out"
    return ""


def _is_output_message(item: Any) -> bool:
    """Returns whether an input is a message as the server returned it, with an id and a status."""
    required = {"id", "status", "content"}
    return isinstance(item, dict) and item.get("role") == "assistant" and required <= item.keys()


def _has_text(content: Any) -> bool:
    if not isinstance(content, list):
        return True  # vLLM checks the type
    return bool(content) and (not isinstance(content[0], dict) or "text" in content[0])
