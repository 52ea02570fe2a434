"""The refusal of an adapter, told by a worker in words, becomes a 400; nothing else is touched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from vllm_backplane.adapter_errors import AdapterErrors, AdapterRefused

LOAD = "/v1/load_lora_adapter"
REFUSED = str(AdapterRefused("it's 'mine'", "lora_A is (8, 64)"))
TOLD = f"Call to add_lora method failed: Worker failed with error '{REFUSED}', please check the stack trace above"


def through(path: str, status: int, parts: Iterable[bytes]) -> tuple[int, bytes, dict[bytes, bytes]]:
    """What a client gets of an answer that the server gives in parts."""
    parts = list(parts)

    async def server(_scope: Any, _receive: Any, send: Any) -> None:
        length = str(sum(map(len, parts))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for place, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": place + 1 < len(parts)})

    sent: list[dict[str, Any]] = []

    async def collect(message: Any) -> None:
        sent.append(message)

    async def never() -> Any:
        raise AssertionError("nobody asks for the request")

    asyncio.run(AdapterErrors(server)({"type": "http", "path": path}, never, collect))
    start, *bodies = sent
    return start["status"], b"".join(body["body"] for body in bodies), dict(start["headers"])


def error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "InternalServerError", "code": 500}}).encode()


@pytest.mark.parametrize("path", [LOAD, "/adapters", f"/prefix{LOAD}"])
def test_a_refused_adapter_is_the_requests_fault(path: str) -> None:
    body = error(TOLD)
    status, answer, headers = through(path, 500, [body[:20], body[20:]])
    assert status == 400
    told = json.loads(answer)["error"]
    assert (told["message"], told["type"], told["code"]) == (REFUSED, "BadRequestError", 400)
    assert headers[b"content-length"] == str(len(answer)).encode()
    assert headers[b"content-type"] == b"application/json"


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        (LOAD, 200, b"Success"),
        (LOAD, 404, error(TOLD)),
        (LOAD, 500, error("the card is gone")),
        (LOAD, 500, b"not json"),
        (LOAD, 500, b"[]"),
        (LOAD, 500, b""),
        ("/v1/completions", 500, error(TOLD)),
    ],
)
def test_other_answers_stay(path: str, status: int, body: bytes) -> None:
    assert through(path, status, [body])[:2] == (status, body)


def test_other_connections_pass() -> None:
    seen = []

    async def server(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(AdapterErrors(server)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
