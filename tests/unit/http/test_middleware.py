"""Tests which middlewares Backplane adds to a server, and the responses of `SleepGate` and `MessageText`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.http.message_text import MessageText
from vllm_backplane.http.sleep_gate import SleepGate
from vllm_backplane.platform import MIDDLEWARES, add_middlewares


def test_they_join_the_middlewares_of_a_server() -> None:
    parser = argparse.ArgumentParser(prog="vllm serve")
    parser.add_argument("--middleware", action="append", default=[])
    add_middlewares(parser)
    add_middlewares(parser)
    assert parser.parse_args([]).middleware == [*MIDDLEWARES]
    assert parser.parse_args(["--middleware", "a.b"]).middleware == [*MIDDLEWARES, "a.b"]


def test_other_commands_get_none() -> None:
    parser = argparse.ArgumentParser(prog="vllm bench")
    add_middlewares(parser)
    assert not hasattr(parser.parse_args([]), "middleware")
    parser = argparse.ArgumentParser(prog="vllm snapshot create")
    parser.add_argument("--middleware", action="append", default=[])
    add_middlewares(parser)
    assert parser.parse_args([]).middleware == []


class Engine:
    """Stands in for the methods of vLLM's engine client that the middleware calls, and for a server around them."""

    def __init__(self, enabled: bool = True, servers: int = 1) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=enabled),
            parallel_config=SimpleNamespace(_api_process_count=servers),
        )
        self.errored = False
        self.paused = False
        self.failing = False
        self.is_sleeping_calls = 0

    async def is_sleeping(self) -> bool:
        self.is_sleeping_calls += 1
        return self.paused

    async def wake_up(self, _tags: Any) -> bool:
        self.paused = False
        return True

    async def server(self, scope: Any, _receive: Any, send: Any) -> None:
        if scope["path"].endswith("/sleep"):
            await asyncio.sleep(0.05)
            self.paused = True
            if self.failing:
                raise RuntimeError("no memory")
        elif scope["path"].endswith("/wake_up"):
            self.paused = b"tags" in scope["query_string"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


class Client:
    def __init__(self, engine: Engine) -> None:
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        self.gate = SleepGate(engine.server)

    async def post(self, path: str, query: str = "", method: str = "POST") -> tuple[int, str]:
        sent: list[Any] = []

        async def collect(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "app": self.app}
        await self.gate(scope, None, collect)  # type: ignore[arg-type]
        return sent[0]["status"], sent[1]["body"].decode()


def test_requests_are_answered_with_503_until_all_is_awake() -> None:
    async def run() -> None:
        client = Client(engine := Engine())
        assert await client.post("/v1/completions") == (200, "done")
        assert (await client.post("/sleep", "level=1"))[0] == 200
        for path in ("/v1/chat/completions", "/prefix/v1/embeddings", "/v1/load_lora_adapter"):
            status, body = await client.post(path)
            assert status == 503
            assert "/wake_up" in json.loads(body)["error"]["message"]
        for path in ("/tokenize", "/collective_rpc", "/v1/chat/completions/render"):
            assert await client.post(path) == (200, "done")
        assert await client.post("/v1/models", method="GET") == (200, "done")
        await client.post("/wake_up", "tags=weights")
        assert (await client.post("/v1/completions"))[0] == 503
        await client.post("/wake_up")
        calls = engine.is_sleeping_calls
        assert await client.post("/v1/completions") == (200, "done")
        assert engine.is_sleeping_calls == calls, "a request does not query the engine"

    asyncio.run(run())


def test_a_request_while_it_falls_asleep_waits_for_the_outcome() -> None:
    async def run() -> None:
        client = Client(Engine())
        falling = asyncio.create_task(client.post("/sleep"))
        await asyncio.sleep(0.01)
        assert (await client.post("/v1/completions"))[0] == 503
        assert (await falling)[0] == 200

    asyncio.run(run())


def test_a_sleep_that_fails_leaves_a_server_that_answers() -> None:
    async def run() -> None:
        client = Client(engine := Engine())
        engine.failing = True
        status, body = await client.post("/sleep")
        assert status == 500
        assert json.loads(body)["error"]["message"] == "The model was not put to sleep: no memory"
        assert not engine.paused
        assert await client.post("/v1/completions") == (200, "done")

    asyncio.run(run())


def test_a_pause_is_no_sleep() -> None:
    async def run() -> None:
        client = Client(Engine())
        await client.post("/sleep", "level=0")
        assert await client.post("/v1/completions") == (200, "done")  # vLLM lets it wait

    asyncio.run(run())


def test_sleep_mode_that_is_off_is_the_requests_fault() -> None:
    async def run() -> None:
        client = Client(engine := Engine(enabled=False))
        status, body = await client.post("/sleep")
        assert status == 400
        assert "--enable-sleep-mode" in json.loads(body)["error"]["message"]
        assert not engine.paused

    asyncio.run(run())


def test_one_of_several_servers_queries_the_engine() -> None:
    async def run() -> None:
        client = Client(engine := Engine(servers=2))
        assert await client.post("/v1/completions") == (200, "done")
        engine.paused = True  # by another
        assert (await client.post("/v1/completions"))[0] == 503

    asyncio.run(run())


ANSWER = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}


def exchange(server: Any, path: str = "/v1/responses", whole: bytes = b"") -> list[Any]:
    """Returns what a client receives from a server behind `MessageText` for a request that arrives in two parts."""
    arriving = [
        {"type": "http.request", "body": whole[:7], "more_body": True},
        {"type": "http.request", "body": whole[7:], "more_body": False},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return arriving.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(MessageText(server)({"type": "http", "method": "POST", "path": path}, receive, send))
    return sent


@pytest.mark.parametrize("raises", [False, True], ids=["status 500", "an exception"])
@pytest.mark.parametrize(
    ("path", "request_body", "is_explained"),
    [
        ("/v1/responses", {"input": [{**ANSWER, "content": []}]}, True),
        ("/v1/responses", {"input": ["x", {**ANSWER, "content": [{"type": "refusal", "refusal": "no"}]}]}, True),
        ("/v1/responses", {"input": [{**ANSWER, "content": [{"type": "output_text", "text": ""}]}]}, False),
        ("/v1/responses", {"input": [{"role": "assistant", "content": []}]}, False),  # as clients write it
        ("/v1/responses", {"input": [{**ANSWER, "content": "text"}]}, False),
        ("/v1/responses", {"input": "text"}, False),
        ("/v1/responses", [1], False),
        ("/v1/completions", {"input": [{**ANSWER, "content": []}]}, False),
    ],
)
def test_failures_because_of_messages_without_text_are_explained(
    path: str, request_body: Any, is_explained: bool, raises: bool
) -> None:
    whole = json.dumps(request_body).encode()

    async def server(_scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] + (await receive())["body"] == whole
        if raises:
            raise IndexError("list index out of range")
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"list index out of range"})

    if raises and not is_explained:
        with pytest.raises(IndexError):
            exchange(server, path, whole)
        return
    start, body = exchange(server, path, whole)
    assert start["status"] == (400 if is_explained else 500)
    if is_explained:
        assert "without text; give it a text" in json.loads(body["body"])["error"]["message"]
    else:
        assert body["body"] == b"list index out of range"


@pytest.mark.parametrize("status", [200, 400])
def test_other_responses_stay(status: int) -> None:
    """Tests a server that gets along with such a message."""
    answer = [
        {"type": "http.response.start", "status": status, "headers": []},
        {"type": "http.response.body", "body": b"done"},
    ]

    async def server(_scope: Any, receive: Any, send: Any) -> None:
        assert [await receive() for _ in range(3)][-1] == {"type": "http.disconnect"}
        for message in answer:
            await send(message)

    assert exchange(server, whole=json.dumps({"input": [{**ANSWER, "content": []}]}).encode()) == answer


def test_nothing_is_read_from_a_client_that_vllm_rejects() -> None:
    """Backplane's middlewares surround that of vLLM which examines the API key."""

    async def receive() -> Any:
        raise AssertionError("the request body must not be read")

    async def reject(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no key"})

    async def run(middleware: Any, path: str) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await middleware(
            {**scope, "app": SimpleNamespace(state=SimpleNamespace(engine_client=Engine()))}, receive, send
        )
        return sent

    for name in MIDDLEWARES:
        module, _, middleware = name.rpartition(".")
        app = getattr(importlib.import_module(module), middleware)(reject)
        for path in ("/v1/responses", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"):
            start, body = asyncio.run(run(app, path))
            assert (start["status"], body["body"]) == (401, b"no key"), (name, path)
