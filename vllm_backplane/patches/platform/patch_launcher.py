"""Makes vLLM's HTTP server exit with status 1 when its engine died and with that of a signal that stopped it, and
limits how long a shutdown waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from vllm_backplane.guards import guarded
from vllm_backplane.http.served_addresses import served_facts
from vllm_backplane.process import start_events
from vllm_backplane.process.fast_exit import exit_with_status_of_signals
from vllm_patchbay.patch import Patch, Process

logger = logging.getLogger("vllm." + __name__)

GRACE_SECONDS = 3
"""Seconds of two waits of a shutdown, each for responses in flight: until they have ended, before the engine stops, and
until they are sent, as uvicorn's `timeout_graceful_shutdown`. Both need far less."""
START_POLL_SECONDS = 0.02
POLL_SECONDS = 0.5
"""Seconds between two checks of the engine."""

_UNTIL_0_31 = (
    "65b075e11187cbe6 9f0b 7f0b 7484 380a 6ee8 0eba e256 5d6a 7484 5123 380a 6ee8 cb5b e256 e023"
    " e607 9c14 faae 46ed 7e54 73e2 f042 b630 846f 96f9 eb9f 7300 bd13 2809 7712 1282 3fc7 492c 69bf"
    " e254 7187 68c1 b852 43d4 d74f 8278 6050 f48d 504f 7563 eb45 c70d 488e d327 01a5 aee5 5dd5 7015"
    " 41c0 b5d8 946f ba54 99d9 8761 3fc1 3857 d9e5 f1b8 a79a 4346 b0f7 aed6 846c 5e26 4d99 41c0 b5d8"
)
_SINCE_0_32 = (
    "eef8293aeb4682e7 253e 7f0b 7484 380a 6ee8 0eba e256 5d6a 7484 5123 380a 6ee8 cb5b e256 e023"
    " e607 9c14 faae 46ed 7e54 73e2 f042 b630 846f 96f9 7852 7300 bd13 2809 7712 1282 3fc7 492c 69bf"
    " e254 7187 68c1 b852 43d4 d74f 8278 6050 f48d 504f 7563 eb45 c70d 488e d327 01a5 aee5 5dd5 7015"
    " 41c0 b5d8 946f ba54 99d9 8761 3fc1 3857 d9e5 f1b8 a79a 4346 b0f7 aed6 846c 5e26 4d99 41c0 b5d8"
)


@Patch(
    target="vllm.entrypoints.launchers.launcher:serve_http",
    process=Process.PLATFORM,
    versions=">=0.30,<0.34",
    why="After a worker or the engine died, the server exits with status 0, which a supervisor takes for success. "
    "After Ctrl-C it waits without limit for streams that the engine no longer feeds. It checks its engine every five "
    "seconds, so the end of a broken server takes long.",
    how="Ends responses in flight before the engine is stopped, gives uvicorn a limit for them, logs requests that "
    "come too late in one line, checks the engine twice a second, and exits with status 1 if the server stopped "
    "because of its engine, and with that of the signal if a signal stopped it. Under `vllm-backplane serve`, it also "
    "reports when the server answers, and its addresses.",
    upstream="https://github.com/vllm-project/vllm/issues/48966",
    remove_when="vLLM exits with a status other than 0 after its engine died and passes a graceful timeout to uvicorn.",
    fixed_if=("vllm.entrypoints.launchers.launcher:serve_http", "timeout_graceful_shutdown"),
    fingerprints={"0.30.0": _UNTIL_0_31, "0.31.0": _UNTIL_0_31, "0.32.0": _SINCE_0_32, "0.33.0": _SINCE_0_32},
)
async def serve_http(app: Any, *args: Any, **options: Any) -> Coroutine[Any, Any, None]:
    options.setdefault("timeout_graceful_shutdown", GRACE_SECONDS)
    engine = app.state.engine_client  # taken now: the application drops its state when it ends
    if engine is None:
        return await serve_http.original(app, *args, **options)
    loop = asyncio.get_running_loop()
    stop, stopped = engine.shutdown, False

    def shutdown(timeout: float | None = None) -> Any:
        # vLLM calls this in a thread after a signal. The client reports an engine that was shut down as errored, like
        # one that died.
        nonlocal stopped
        if not stopped:
            _shorten_errors_of_late_requests()
        stopped = True
        if not timeout:  # otherwise responses in flight go on until then
            stopping = asyncio.run_coroutine_threadsafe(_stop_outputs(engine), loop)
            stopping.add_done_callback(_report_outputs_not_stopped)
            concurrent.futures.wait([stopping], GRACE_SECONDS)  # the engine is stopped in any case
        try:
            return stop(timeout=timeout)
        finally:
            loop.call_soon_threadsafe(_end_streams, engine)

    async def watch() -> None:
        from vllm.entrypoints.launchers.launcher import terminate_if_errored

        server = app.state.server  # the original sets it before it first waits, and installs its signal handlers
        exit_with_status_of_signals()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if engine.errored:
                # Ctrl-C reaches all processes, and may have ended the engine before this process has handled it.
                await asyncio.sleep(POLL_SECONDS)
                if not stopped:
                    terminate_if_errored(server, engine)

    engine.shutdown = shutdown
    watching = loop.create_task(watch())
    watching.add_done_callback(_report_unwatched)
    announcing = loop.create_task(_announce(app, engine))
    announcing.add_done_callback(_report_unannounced)
    try:
        ending = await serve_http.original(app, *args, **options)
    finally:
        watching.cancel()
        announcing.cancel()
        del engine.shutdown  # restores the method of the class
    return _shut_down(ending, engine, failed=engine.errored and not stopped)


def _shorten_errors_of_late_requests() -> None:
    """Makes vLLM log requests that reach the engine while it stops in one line, instead of with a traceback."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_without_traceback_of_dead_engine)


def _without_traceback_of_dead_engine(record: logging.LogRecord) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    fault = record.exc_info[1] if record.exc_info else None
    if isinstance(fault, EngineDeadError):
        record.msg, record.args = f"{record.getMessage()} The server is stopping.", ()
        record.exc_info = record.exc_text = None
    return True


@guarded(
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown",
    "vllm.v1.engine.async_llm:AsyncLLM._run_output_handler",
    why="what it does last, the end of the task of outputs, is done before the engine stops",
    mentions=("output_handler",),
)
async def _stop_outputs(engine: Any) -> None:
    """Ends the responses in flight, and the task that passes the outputs of the engine to them. An engine that stops
    while the task waits for outputs would be an error of the task and of each response."""
    _end_streams(engine)
    if (handler := engine.output_handler) is not None:
        handler.cancel()
        await asyncio.wait([handler])


def _report_outputs_not_stopped(stopping: concurrent.futures.Future[None]) -> None:
    if not stopping.cancelled() and (fault := stopping.exception()):
        logger.error("Responses in flight were not ended before the engine, because of an error.", exc_info=fault)


@guarded(
    "vllm.v1.engine.output_processor:OutputProcessor.abort_requests",
    why="it ends all requests in the process of the server, without their engine",
    mentions=("request_states",),
)
def _end_streams(engine: Any) -> None:
    """Ends the responses in flight with the finish reason "abort". Without this, they would wait if the engine is
    killed before it has aborted their requests."""
    processor = engine.output_processor
    processor.abort_requests(list(processor.request_states), internal=True)


async def _announce(app: Any, engine: Any) -> None:
    """Reports the addresses of the server as soon as it answers."""
    if start_events.announced() is None:
        return
    while not getattr(getattr(app.state, "server", None), "started", False):
        await asyncio.sleep(START_POLL_SECONDS)
    start_events.report("ready", **await served_facts(app, engine))


def _report_unannounced(announcing: asyncio.Task[None]) -> None:
    if not announcing.cancelled() and (fault := announcing.exception()):
        logger.error("The server is up, and its addresses cannot be shown, because of an error.", exc_info=fault)


def _report_unwatched(watching: asyncio.Task[None]) -> None:
    """Logs why the checks twice a second have ended. vLLM's `watchdog_loop` still checks the engine, more rarely."""
    if not watching.cancelled() and (fault := watching.exception()):
        logger.error("The engine is no longer checked twice a second, because a check failed.", exc_info=fault)


async def _shut_down(ending: Coroutine[Any, Any, None], engine: Any, failed: bool) -> None:
    """Awaits vLLM's shutdown, and exits with status 1 and a reason if the engine died."""
    await ending
    if not failed:
        return
    if -signal.SIGBUS in _exit_codes(engine):
        raise SystemExit(
            "The server exits because its engine died of SIGBUS: a file that it had mapped was truncated, most often a "
            "checkpoint that was written again, or /dev/shm is full. Start the server again with a complete file; to "
            "replace the file of a running server, rename the new file to its name."
        )
    raise SystemExit(
        "The server exits because its engine died. If no error above gives the reason, another program killed the "
        "engine, most often the system for lack of memory (see the kernel log). If a worker died with the exit code "
        f"{-signal.SIGBUS}, a checkpoint that it had mapped was truncated."
    )


def _exit_codes(engine: Any) -> list[int]:
    """Returns the exit codes of the engine's processes that ended; none if another process has started them."""
    resources = getattr(getattr(engine, "engine_core", None), "resources", None)
    processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
    return [process.exitcode for process in processes if process.exitcode is not None]
