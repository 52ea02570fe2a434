"""Defines a server with the OpenAI chat API that answers as a test wants, faults included."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"data": [{"id": "first", "owned_by": "vllm"}, {"id": "second", "owned_by": "vllm"}]}


def event(text: str = "", *, finish: str | None = None, tokens: int | None = None, **delta: str) -> bytes:
    """Returns an event of a stream."""
    body: dict[str, Any] = {"choices": [{"delta": {"content": text, **delta}, "finish_reason": finish}]}
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": tokens}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class StandIn:
    """Answers requests for chat completions with `answer`, and records them."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Callable[[Any], None] = lambda handler: stream(handler, event("hello"), DONE)
        self.models: Any = MODELS
        self.disconnected = threading.Event()
        """Set when a client has closed its connection in the middle of an answer."""


def stream(handler: Any, *events: bytes) -> None:
    """Sends a stream of events, and closes the connection."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
    handler.end_headers()
    for one in events:
        handler.wfile.write(one)
        handler.wfile.flush()


def endless(handler: Any) -> None:
    """Sends a word again and again, until the client disconnects."""
    stream(handler)
    try:
        while True:
            handler.wfile.write(event("word ", tokens=1))
            handler.wfile.flush()
            time.sleep(0.01)
    except OSError:
        handler.server.stand_in.disconnected.set()


def refuse(status: int, body: Any) -> Callable[[Any], None]:
    """Returns an answer with a status and a body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    def answer(handler: Any) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        self.server.stand_in.keys.append(self.headers.get("Authorization"))
        refuse(200, self.server.stand_in.models)(self)

    def do_POST(self) -> None:
        stand_in = self.server.stand_in
        stand_in.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        stand_in.answer(self)

    def log_message(self, *_arguments: Any) -> None:
        """Logs nothing."""


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def get_request(self) -> tuple[Any, Any]:
        request, _ = super().get_request()
        return request, ("unix", 0)


@contextmanager
def running(socket_path: str | None = None) -> Iterator[tuple[StandIn, str]]:
    """Runs a stand-in server on loopback or on a Unix socket; yields it with its address."""
    made: Any
    if socket_path is None:
        made = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        made.daemon_threads = True
        address = f"http://127.0.0.1:{made.server_port}"
    else:
        made, address = _UnixServer(socket_path, _Handler), f"unix:{socket_path}"
    made.stand_in = StandIn()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made.stand_in, address
    finally:
        made.shutdown()
        made.server_close()
