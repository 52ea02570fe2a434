"""Answers requests with 503 while the engine is asleep, and names POST /wake_up as the remedy.

Without this ASGI middleware, vLLM accepts such a request and lets it wait in silence until a client wakes the engine. A
query of the engine whether it sleeps takes as long as a scheduler step. The middleware therefore follows the /sleep and
/wake_up requests that pass through it, and queries the engine only after a /wake_up. Where several API servers share an
engine (--api-server-count), another server may have put it to sleep, so each request queries the engine.

A failed sleep leaves the engine awake and its scheduler paused: the middleware resumes the scheduler. It also sends the
error response itself, because vLLM's server would close the connection after an exception.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs

from vllm_backplane.guards import guarded
from vllm_backplane.http.asgi import App, Message, Receive, Send, send_error

SLEEP, WAKE = "/sleep", "/wake_up"
NEEDS_MODEL = (
    "/completions", "/completions/batch", "/chat", "/responses", "/messages", "/generate", "/invocations",
    "/embeddings", "/embed", "/pooling", "/classify", "/score", "/generative_scoring", "/rerank",
    "/transcriptions", "/translations", "/systemone", "/load_lora_adapter", "/adapters",
)  # fmt: skip
"""Path suffixes of requests that run the model or write to its memory."""
ASLEEP = "The model is asleep and its memory is released. POST /wake_up to wake it, then send the request again."
OFF = "Sleep mode is off. Start the server with --enable-sleep-mode."


class SleepGate:
    """Answers requests for the model with 503 while the engine is asleep, as ASGI middleware."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._asleep = False
        self._transition = asyncio.Lock()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        if path.endswith(SLEEP):
            await self._sleep(scope, receive, send)
        elif path.endswith(WAKE):
            await self._wake(scope, receive, send)
        elif path.endswith(NEEDS_MODEL) and await self._is_asleep(_engine(scope)):
            await send_error(send, 503, ASLEEP)
        else:
            await self.app(scope, receive, send)

    async def _is_asleep(self, engine: Any) -> bool:
        config = engine.vllm_config
        if not config.model_config.enable_sleep_mode:
            return False
        if _api_servers(config) > 1:
            return bool(await engine.is_sleeping())
        if self._transition.locked():  # wait for the result of the /sleep or /wake_up in progress
            async with self._transition:
                pass
        return self._asleep

    async def _sleep(self, scope: Message, receive: Receive, send: Send) -> None:
        engine = _engine(scope)
        # Level 0 only pauses the scheduler; vLLM lets requests wait meanwhile.
        frees_memory = parse_qs(scope["query_string"].decode("latin-1")).get("level", ["1"])[-1] != "0"
        if frees_memory and not engine.vllm_config.model_config.enable_sleep_mode:
            await send_error(send, 400, OFF)
            return
        status = 0

        async def record_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async with self._transition:
            try:
                await self.app(scope, receive, record_status)
            except Exception as fault:
                if status:
                    raise
                if not self._asleep and not engine.errored:
                    await engine.wake_up(None)
                await send_error(send, 500, f"The model was not put to sleep: {fault}")
            if status == 200:
                self._asleep |= frees_memory

    async def _wake(self, scope: Message, receive: Receive, send: Send) -> None:
        engine = _engine(scope)
        async with self._transition:
            try:
                await self.app(scope, receive, send)
            except Exception as fault:
                await send_error(send, 500, f"The model was not woken: {fault}")
            if self._asleep and not engine.errored:
                self._asleep = await engine.is_sleeping()


@guarded(
    "vllm.config.parallel:ParallelConfig._validate_parallel_config",
    why="the private field has the number of API servers",
)
def _api_servers(config: Any) -> int:
    return int(config.parallel_config._api_process_count)


def _engine(scope: Message) -> Any:
    return scope["app"].state.engine_client
