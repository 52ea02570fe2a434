"""Answers requests to /v1/responses with 400 if a message of the assistant among their inputs has no text.

vLLM 0.32 reads the text of the first part of such a message, and answers 500 if there is no part, or one without text.
"""

from __future__ import annotations

import json
from typing import Any

from vllm_backplane.http.asgi import App, Message, Receive, Send, send_error

PATH = "/v1/responses"


class MessageText:
    """Refuses messages of the assistant without text, as ASGI middleware."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATH):
            await self.app(scope, receive, send)
            return
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
        fault = fault_of(b"".join(message.get("body", b"") for message in messages))
        if fault:
            await send_error(send, 400, fault)
            return
        left = iter(messages)

        async def receive_again() -> Message:
            """Returns the messages that were received, and then further ones."""
            return next(left, None) or await receive()

        await self.app(scope, receive_again, send)


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
