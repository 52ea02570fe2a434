"""Tests that a rejected adapter becomes a 400 with the reason, and that other responses pass unchanged."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.lora.http_errors import PATHS, AdapterErrors, AdapterRefused

LOAD = "/v1/load_lora_adapter"
REFUSED = str(AdapterRefused("it's 'mine'", "lora_A is (8, 64)"))
RAISED = f"Call to add_lora method failed: Worker failed with error '{REFUSED}', please check the stack trace above"


def through(
    path: str,
    status: int,
    parts: Iterable[bytes],
    request_body: bytes | None = None,
    state: Any = None,
    kind: bytes = b"application/json; charset=utf-8",
    answered: bytes = b"application/json",
) -> tuple[int, bytes, dict[bytes, bytes]]:
    """Returns status, body and headers that a client receives from a server with the given `state`, which sends its
    response in `parts`. `request_body` is None if no code may read it."""
    parts = list(parts)

    async def server(_scope: Any, receive: Any, send: Any) -> None:
        if request_body is not None:
            assert (await receive())["body"] == request_body
        length = str(sum(map(len, parts))).encode()
        headers = [(b"content-type", answered), (b"content-length", length)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for place, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": place + 1 < len(parts)})

    sent: list[dict[str, Any]] = []

    async def collect(message: Any) -> None:
        sent.append(message)

    async def request() -> Any:
        assert request_body is not None or path.endswith(PATHS), "the request body must not be read"
        return {"type": "http.request", "body": request_body or b"{}"}

    headers = [(b"content-type", kind)]
    scope = {
        "type": "http",
        "path": path,
        "headers": headers,
        **({"app": SimpleNamespace(state=state)} if state else {}),
    }
    asyncio.run(AdapterErrors(server)(scope, request, collect))
    start, *bodies = sent
    return start["status"], b"".join(body["body"] for body in bodies), dict(start["headers"])


def error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "InternalServerError", "code": 500}}).encode()


@pytest.mark.parametrize("path", [LOAD, "/adapters", f"/prefix{LOAD}"])
def test_a_refused_adapter_is_the_requests_fault(path: str) -> None:
    body = error(RAISED)
    status, answer, headers = through(path, 500, [body[:20], body[20:]])
    assert status == 400
    reported = json.loads(answer)["error"]
    assert (reported["message"], reported["type"], reported["code"]) == (REFUSED, "BadRequestError", 400)
    assert headers[b"content-length"] == str(len(answer)).encode()
    assert headers[b"content-type"] == b"application/json"


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        (LOAD, 200, b"Success"),
        (LOAD, 404, error(RAISED)),
        (LOAD, 500, error("the card is gone")),
        (LOAD, 500, b"not json"),
        (LOAD, 500, b"[" * 100_000),
        (LOAD, 500, b"[]"),
        (LOAD, 500, b""),
        ("/v1/completions", 500, error(RAISED)),
    ],
)
def test_other_answers_stay(path: str, status: int, body: bytes) -> None:
    assert through(path, status, [body])[:2] == (status, body)


@pytest.mark.parametrize("path", [LOAD, "/adapters"])
@pytest.mark.parametrize("body", [b'{"lora_name": "\\ud800", "lora_path": "/a"}', b'{"a": {"b": ["\\udcff"]}}'])
def test_text_that_cannot_be_sent_back_is_refused(path: str, body: bytes) -> None:
    """Tests lone surrogates, which JSON can express and UTF-8 cannot."""
    status, answer, headers = through(path, 200, [b"never sent"], body)
    assert status == 400
    assert "is not text that can be encoded as UTF-8; choose another one" in json.loads(answer)["error"]["message"]
    assert headers[b"content-length"] == str(len(answer)).encode()


def test_the_server_does_not_get_the_end_of_such_a_request() -> None:
    """The server would load the adapter."""
    arriving = [
        {"type": "http.request", "body": b'{"lora_name": "\\ud800', "more_body": True},
        {"type": "http.request", "body": b'"}', "more_body": False},
    ]
    arrived, sent = [], []

    async def server(_scope: Any, receive: Any, send: Any) -> None:
        arrived.extend([await receive(), await receive()])
        await send({"type": "http.response.start", "status": 400, "headers": []})

    async def request() -> Any:
        return arriving.pop(0)

    async def collect(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "path": LOAD, "headers": [(b"content-type", b"application/json")]}
    asyncio.run(AdapterErrors(server)(scope, request, collect))
    assert arrived[-1] == {"type": "http.disconnect"}
    assert b"is not text that can be encoded as UTF-8" in sent[1]["body"]


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[1]", b'"text"', '{"lora_name": "Zürich"}'.encode()])
def test_other_requests_reach_the_server_as_they_are(body: bytes) -> None:
    assert through(LOAD, 200, [b"done"], body or b" ")[:2] == (200, b"done")


def test_other_connections_pass() -> None:
    seen = []

    async def server(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(AdapterErrors(server)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


class Engine:
    """Stands in for the part of vLLM's engine client that the middleware uses: loads an adapter, or raises `fault`."""

    errored = False

    def __init__(self, fault: str | None) -> None:
        self.fault, self.loaded = fault, 0

    async def add_lora(self, request: Any) -> bool:
        self.loaded += 1
        if self.fault is not None:
            raise RuntimeError(self.fault)
        return True


def serving(engine: Engine) -> Any:
    mine = SimpleNamespace(lora_name="mine", lora_path="/gone")
    return SimpleNamespace(engine_client=engine, openai_serving_models=SimpleNamespace(lora_requests={"mine": mine}))


COMPLETE = "/v1/completions"
MINE = b'{"model": "mine", "prompt": "a"}'


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        (RAISED, 400, REFUSED),
        ("Call failed: Loading lora mine failed: No adapter found for /gone", 404, "No adapter found for /gone"),
        ("no memory", 500, "no memory"),
        (None, 500, "Internal server error"),
    ],
)
def test_the_error_of_a_failed_request_names_the_fault_of_its_adapter(fault: Any, status: int, message: str) -> None:
    engine = Engine(fault)
    found, answer, headers = through(COMPLETE, 500, [error("Internal server error")], MINE, serving(engine))
    reported = json.loads(answer)["error"]
    assert (found, reported["code"], engine.loaded) == (status, status, 1)
    assert message in reported["message"]
    assert headers[b"content-length"] == str(len(answer)).encode()


@pytest.mark.parametrize(
    ("status", "request_body"),
    [(500, b'{"model": "the model"}'), (500, b"sound"), (500, b"[" * 100_000), (200, MINE), (400, MINE)],
)
def test_the_engine_is_not_called_for_others(status: int, request_body: bytes) -> None:
    engine, body = Engine(RAISED), error("Internal server error")
    assert through(COMPLETE, status, [body], request_body, serving(engine))[:2] == (status, body)
    assert engine.loaded == 0


@pytest.mark.parametrize("body", [error("the template is wrong"), b"not json"])
def test_other_failures_of_requests_with_an_adapter_stay(body: bytes) -> None:
    engine = Engine(RAISED)
    assert through(COMPLETE, 500, [body], MINE, serving(engine))[:2] == (500, body)
    assert engine.loaded == 0


def test_requests_that_are_not_json_are_not_kept() -> None:
    engine, body = Engine(RAISED), error("Internal server error")
    found = through(COMPLETE, 500, [body], MINE, serving(engine), kind=b"multipart/form-data; boundary=a")
    assert (found[:2], engine.loaded) == ((500, body), 0)


def test_an_engine_that_has_ended_is_not_called() -> None:
    engine, body = Engine(RAISED), error("Internal server error")
    engine.errored = True
    assert through(COMPLETE, 500, [body], MINE, serving(engine))[:2] == (500, body)
    assert engine.loaded == 0


EVENTS = b"text/event-stream; charset=utf-8"
BEGUN, DONE = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"


def event(message: str) -> bytes:
    return b"data: " + error(message) + b"\n\n"


def test_the_last_event_of_a_stream_names_the_fault_of_its_adapter() -> None:
    engine, parts = Engine(RAISED), [BEGUN, event("Internal server error"), DONE]
    status, answer, _ = through(COMPLETE, 200, parts, MINE, serving(engine), answered=EVENTS)
    begun, failed, done = answer.split(b"\n\n")[:3]
    reported = json.loads(failed.removeprefix(b"data: "))["error"]
    assert (status, reported["code"], reported["message"], engine.loaded) == (200, 400, REFUSED, 1)
    assert [begun, done] == [BEGUN.strip(), DONE.strip()]


@pytest.mark.parametrize(
    ("request_body", "parts", "answered"),
    [
        (b'{"model": "the model"}', [event("Internal server error"), DONE], EVENTS),
        (MINE, [event("the template is wrong"), DONE], EVENTS),
        (MINE, [BEGUN, DONE], EVENTS),
        (MINE, [event("Internal server error")], b"text/plain"),
    ],
)
def test_other_events_stay(request_body: bytes, parts: list[bytes], answered: bytes) -> None:
    engine = Engine(RAISED)
    assert through(COMPLETE, 200, parts, request_body, serving(engine), answered=answered)[1] == b"".join(parts)
    assert engine.loaded == 0


def test_a_request_is_not_kept_beyond_the_beginning_of_its_answer() -> None:
    """A stream may last for minutes, and a prompt may be megabytes."""
    size, held = 8 << 20, []

    async def server(_scope: Any, receive: Any, send: Any) -> None:
        assert len((await receive())["body"]) == size
        held.append(tracemalloc.get_traced_memory()[0])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENTS)]})
        held.append(tracemalloc.get_traced_memory()[0])
        await receive()  # as servers wait for the end of the connection
        held.append(tracemalloc.get_traced_memory()[0])

    async def request() -> Any:
        return {"type": "http.request", "body": b" " * size}

    async def drop(_message: Any) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    app = SimpleNamespace(state=serving(Engine(None)))
    scope = {"type": "http", "path": COMPLETE, "headers": headers, "app": app}
    tracemalloc.start()
    try:
        asyncio.run(AdapterErrors(server)(scope, request, drop))
    finally:
        tracemalloc.stop()
    received, begun, waited = held
    assert received > size > 2 * begun and size > 2 * waited, held
