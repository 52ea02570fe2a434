"""Tests the patch serve_http with a real uvicorn server whose engine is healthy, dead, or no longer produces tokens."""

from __future__ import annotations

import asyncio
import faulthandler
import io
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from vllm import SamplingParams
from vllm.entrypoints.launchers import launcher
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.utils import CoreEngineProcManager

from vllm_backplane.patches.platform import patch_launcher
from vllm_backplane.patches.platform.patch_launcher import serve_http
from vllm_patchbay.patch import Outcome, verify
from vllm_patchbay.upstream import SymbolIndex, installed_tree

DEADLINE = 60
"""Seconds after which a server that hangs fails the test."""


class Engine:
    """Stands in for the part of an engine client that the launcher uses."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(shutdown_timeout=0)
        self.errored = False
        self.engine_core: Any = None
        self.should_keep_api_server_alive = False  # asked since vLLM 0.33
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.output_handler: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return not self.errored

    def shutdown(self, timeout: float | None = None) -> None:
        self.errored = True  # vLLM's client has this state after its engine was stopped


@pytest.fixture
def unpatched() -> Any:
    """Returns vLLM's function, also if another test of this process has applied the patch."""
    return serve_http.original or launcher.serve_http


@pytest.fixture
def patched(unpatched: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(serve_http, "original", unpatched)
    monkeypatch.setattr(patch_launcher, "exit_with_status_of_signals", lambda: None)  # it is for the whole process
    return serve_http.replacement


async def endless() -> AsyncIterator[bytes]:
    yield b"one"
    await asyncio.Event().wait()


def serve(function: Any, engine: Engine, event: Any, pieces: Callable[[], AsyncIterator[bytes]] = endless) -> None:
    """Runs `function` as vLLM does until it returns, and calls `event` when a stream of `pieces` has begun."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        del app.state  # vLLM's application does this too

    async def main() -> None:
        app = FastAPI(lifespan=lifespan)
        app.state.engine_client = engine

        @app.get("/stream")
        async def stream() -> StreamingResponse:
            return StreamingResponse(pieces())

        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            client = asyncio.create_task(read(port))
            ending = await function(app, listening, host="127.0.0.1", port=port, log_level="error")
            await ending
            client.cancel()

    async def read(port: int) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE) as http:
            while True:
                try:
                    async with http.stream("GET", f"http://127.0.0.1:{port}/stream") as response:
                        async for _piece in response.aiter_raw():
                            event()
                except httpx.TransportError:
                    await asyncio.sleep(0.05)

    ends: list[SystemExit] = []

    async def end() -> None:
        try:
            await main()
        except SystemExit as fault:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise TimeoutError(f"the server ended only when it was cancelled, after {DEADLINE} s") from fault
            # A task would keep it, and asyncio would print it in some later test, when the task is destroyed.
            ends.append(fault)

    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await end()

    asyncio.run(limited())
    if ends:
        raise ends[0]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_fits_the_installed_vllm() -> None:
    tree = installed_tree()
    assert verify(serve_http, SymbolIndex(tree), tree.version).outcome is Outcome.FITS


@pytest.mark.slow
def test_a_dead_engine_is_an_error(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch notices it without vLLM's own watchdog, which would take seconds longer."""

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(launcher, "watchdog_loop", never)
    engine = Engine()
    with pytest.raises(SystemExit, match="engine died"):
        serve(patched, engine, lambda: setattr(engine, "errored", True))


def end_by(number: int) -> None:
    faulthandler.disable()  # it would print the stack of this process
    os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGBUS, r"engine died of SIGBUS: a file that it had mapped was truncated.*rename the new file"),
        (signal.SIGKILL, "engine died. If no error above gives the reason.*lack of memory"),
    ],
)
def test_the_signal_that_ended_the_engine_is_explained(patched: Any, number: int, reason: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=end_by, args=(number,))  # a spawned one imports vLLM
    process.start()
    manager = CoreEngineProcManager.__new__(CoreEngineProcManager)  # without an engine
    manager.processes = [process]
    engine = Engine()
    engine.engine_core = SimpleNamespace(resources=BackgroundResources(ctx=None, engine_manager=manager))

    def die() -> None:
        process.join(DEADLINE)
        engine.errored = True

    with pytest.raises(SystemExit, match=reason):
        serve(patched, engine, die)


@pytest.mark.slow
def test_an_interrupt_is_no_error_and_waits_for_no_stream(patched: Any) -> None:
    serve(patched, Engine(), interrupt)


@pytest.mark.slow
def test_responses_end_before_the_engine(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of this test sends nothing when it is stopped, like one that is killed.

    An engine that stops while vLLM's task waits for its outputs is an error of the task, and of each response.
    """
    monkeypatch.setattr(patch_launcher, "GRACE_SECONDS", DEADLINE)
    engine = Engine()
    stop = engine.shutdown
    reasons: list[str] = []
    waiting: list[bool] = []

    def shutdown(timeout: float | None = None) -> None:
        waiting.append(bool(engine.output_processor.request_states) or not engine.output_handler.cancelled())  # type: ignore[union-attr]
        stop(timeout)

    engine.shutdown = shutdown  # type: ignore[method-assign]

    async def generated() -> AsyncIterator[bytes]:
        if reasons:  # the client asks again until the server is gone
            return
        queue = RequestOutputCollector(RequestOutputKind.DELTA, "1")
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
        request = EngineCoreRequest(
            request_id="1",
            external_req_id="1",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        engine.output_processor.add_request(request, None, queue=queue)
        engine.output_handler = asyncio.create_task(asyncio.sleep(DEADLINE))
        yield b"one"
        output = await queue.get()
        reasons.append(output.outputs[0].finish_reason)  # type: ignore[union-attr, arg-type]

    serve(patched, engine, interrupt, generated)
    assert reasons == ["abort"]
    assert waiting == [False]


@pytest.mark.slow
def test_the_engine_stops_if_responses_cannot_be_ended(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def abort_requests(*_arguments: Any, **_options: Any) -> None:
        raise LookupError("no such request")

    text = io.StringIO()
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [logging.StreamHandler(text)])
    engine = Engine()
    monkeypatch.setattr(engine.output_processor, "abort_requests", abort_requests)
    serve(patched, engine, interrupt)
    assert engine.errored, "the engine was stopped"
    assert "Responses in flight were not ended before the engine" in text.getvalue()
    assert "LookupError: no such request" in text.getvalue()


@pytest.mark.slow
def test_a_request_that_comes_while_the_engine_stops_is_one_line(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(text)])
    engine = Engine()

    def report(fault: Exception) -> None:
        try:
            raise fault
        except Exception:
            logging.getLogger("vllm.serving").exception("Error in %s.", "a stream")

    report(EngineDeadError())
    assert "Traceback" in text.getvalue(), "an engine that died by itself is explained"
    stop = engine.shutdown

    def shutdown(timeout: float | None = None) -> None:
        text.truncate(0)
        report(EngineDeadError())
        stop(timeout)

    engine.shutdown = shutdown  # type: ignore[method-assign]
    serve(patched, engine, interrupt)
    assert "Error in a stream. The server is stopping.\n" in text.getvalue()
    assert "Traceback" not in text.getvalue()
    report(ValueError("not the engine"))
    assert "Traceback" in text.getvalue()


@pytest.mark.slow
def test_an_engine_that_gets_the_interrupt_first_is_no_error(patched: Any) -> None:
    """An interrupt from a terminal reaches all processes, in any order."""
    engine = Engine()
    stop = engine.shutdown

    def slow(timeout: float | None = None) -> None:
        # Long enough for vLLM's watchdog to end the server.
        time.sleep(8)
        stop(timeout)

    engine.shutdown = slow  # type: ignore[method-assign]

    def both() -> None:
        engine.errored = True
        interrupt()

    serve(patched, engine, both)


@pytest.mark.slow
def test_vllm_alone_waits(unpatched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the reason for the patch. If this fails, vLLM has changed and the patch may no longer be needed."""
    monkeypatch.setattr(f"{__name__}.DEADLINE", 2 * patch_launcher.GRACE_SECONDS)
    with pytest.raises(TimeoutError):
        serve(unpatched, Engine(), interrupt)
