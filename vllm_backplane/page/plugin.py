"""Implements vLLM's protocol of an endpoint plugin for the page, and the middleware that attaches it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.tasks import GENERATION_TASKS, POOLING_TASKS

from vllm_backplane.http.asgi import App, Message, Receive, Send
from vllm_backplane.http.served_addresses import answers
from vllm_backplane.page.access import Access
from vllm_backplane.page.live_figures import LiveFigures
from vllm_backplane.page.loading import ENTRY_POINT
from vllm_backplane.page.routes import PATHS, Page
from vllm_backplane.page.server_facts import server_facts

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only


class PagePlugin:
    """Adds the page to a server on Backplane's platform. On any other platform it adds nothing."""

    name = ENTRY_POINT
    required_tasks = (*GENERATION_TASKS, *POOLING_TASKS)
    """All tasks of an engine. A server that only renders prompts has none."""

    def __init__(self) -> None:
        self._app: FastAPI | None = None
        self._page: Page | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes of the page, unless one of its paths belongs to somebody else."""
        if not getattr(type(current_platform), "is_backplane", False):
            logger.info("The page of Backplane is not served: vLLM runs on another platform.")
            return
        if taken := [path for path in PATHS if answers(app, path)]:
            logger.warning("The page of Backplane is not served: %s belongs to another part of the server.", taken[0])
            return
        self._app, self._page = app, Page()
        app.router.routes.extend(self._page.routes())

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Collects what stays the same while the server runs."""
        if self._app is None or self._page is None or engine_client is None:
            return
        facts = await server_facts(self._app, engine_client, args)
        self._page.open(Access.of_server(args), facts, LiveFigures())


class PageLoader:
    """Attaches the page to the application that starts, as ASGI middleware. All other messages pass."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            application, plugin = scope["app"], PagePlugin()
            state = application.state
            try:
                plugin.attach_router(application)
                await plugin.init_state(getattr(state, "engine_client", None), state, state.args)
            except Exception:
                # uvicorn takes an exception for a sign that the application has no start of its own, and skips it.
                logger.exception("The page of Backplane is not served, because of an error.")
        await self.app(scope, receive, send)
