"""Defines the ASGI types that Backplane's middlewares use, and the form of vLLM's error responses."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_body(status: int, message: str) -> bytes:
    """Returns the JSON body of an error response, in the form that vLLM's server has."""
    error = {"message": message, "type": _TYPES[status], "param": None, "code": status}
    return json.dumps({"error": error}).encode()


async def send_error(send: Send, status: int, message: str) -> None:
    """Sends an error response, in the form that vLLM's server has."""
    body = error_body(status, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
