"""vLLM's HTTP server ends without a word to its caller when the engine died, and may not end at all by Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from vllm_patchbay.patch import Patch, Process

GRACE_SECONDS = 3
"""For responses in flight once the engine has stopped: what they still have to say is said in far less."""
LOOK_SECONDS = 0.5
"""Between two looks at the engine."""

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
    versions=">=0.30,<0.33",
    why="After a worker or the engine died the server exits with status 0, so whoever supervises it sees success. By "
    "Ctrl-C it waits without limit for streams that no engine feeds any more. At its engine it looks every five "
    "seconds, which is long for whoever waits for the end of a server that is broken.",
    how="Gives uvicorn a limit for responses in flight, looks twice a second, and exits with status 1 when the server "
    "stopped because of its engine; everything else is the original's.",
    upstream="https://github.com/vllm-project/vllm/issues/48966",
    remove_when="vLLM exits with another status than 0 after its engine died and passes a graceful timeout to uvicorn.",
    fingerprints={"0.30.0": _UNTIL_0_31, "0.31.0": _UNTIL_0_31, "0.32.0": _SINCE_0_32},
)
async def serve_http(app: Any, *args: Any, **options: Any) -> Coroutine[Any, Any, None]:
    options.setdefault("timeout_graceful_shutdown", GRACE_SECONDS)
    engine = app.state.engine_client  # taken now: the application drops its state when it ends
    if engine is None:
        return await serve_http.original(app, *args, **options)
    stop, stopped = engine.shutdown, False

    def shutdown(*args: Any, **options: Any) -> Any:
        # Called when a signal came. An engine that was stopped counts as errored, as one that died does.
        nonlocal stopped
        stopped = True
        return stop(*args, **options)

    async def watch() -> None:
        from vllm.entrypoints.launchers.launcher import terminate_if_errored

        server = app.state.server  # the original sets it before it first waits
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if engine.errored:
                # Ctrl-C reaches all processes, and may have ended the engine before this one knows of it.
                await asyncio.sleep(LOOK_SECONDS)
                if not stopped:
                    terminate_if_errored(server, engine)

    engine.shutdown = shutdown
    watching = asyncio.get_running_loop().create_task(watch())
    try:
        ending = await serve_http.original(app, *args, **options)
    finally:
        watching.cancel()
        del engine.shutdown  # the class's own again
    return _ending(ending, failed=engine.errored and not stopped)


async def _ending(ending: Coroutine[Any, Any, None], failed: bool) -> None:
    await ending
    if failed:
        raise SystemExit(
            "The server ends because its engine died. Where no error above says of what, something outside killed it: "
            "most often the system, for want of memory (see the kernel's log)."
        )
