"""Answers the requests of the page: its files, and the status of the server as JSON.

The files are the same for every server and contain no data, so they need no key. Every answer has the headers that make
a browser load nothing from elsewhere and run no script but those files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route

from vllm_backplane.http.asgi import error_body
from vllm_backplane.page.access import UNAUTHORIZED, Access

if TYPE_CHECKING:
    from starlette.requests import Request

    from vllm_backplane.page.live_figures import LiveFigures

FOLDER = Path(__file__).with_name("assets")
FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/backplane/page.css": ("page.css", "text/css; charset=utf-8"),
    "/backplane/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/backplane/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/backplane/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/backplane/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/backplane/server.js": ("server.js", "text/javascript; charset=utf-8"),
    "/backplane/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""File in the folder of assets, and its media type, by path. No other file is served."""
STATUS = "/backplane/status"
PATHS = (*FILES, STATUS)
"""All paths of the page."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer."""


class Page:
    """Holds what the routes of one server answer."""

    def __init__(self) -> None:
        self._access: Access | None = None
        self._facts = b"{}"
        self._figures: LiveFigures | None = None

    def open(self, access: Access, facts: Mapping[str, Any], figures: LiveFigures) -> None:
        """Gives the page what its status consists of. Before, it answers 503."""
        self._access, self._figures = access, figures
        self._facts = json.dumps(facts).encode()

    def routes(self) -> list[Route]:
        """Returns the routes. Starlette answers HEAD where it answers GET, and 405 to other methods."""
        logging.getLogger("uvicorn.access").addFilter(_polled)
        files = [_file_route(path, name, kind) for path, (name, kind) in FILES.items()]
        return [*files, Route(STATUS, self._status, methods=["GET"], include_in_schema=False)]

    async def _status(self, request: Request) -> Response:
        if self._access is None or self._figures is None:
            return _error(503, "The server starts; try again in a moment.")
        if (refusal := self._access.refusal(request.headers)) is not None:
            return _error(refusal.status, refusal.message)
        live = json.dumps(asdict(await self._figures.sample())).encode()
        return _json(200, b'{"facts": %b, "live": %b}' % (self._facts, live))


def _file_route(path: str, name: str, kind: str) -> Route:
    content = (FOLDER / name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(content, headers={**HEADERS, "Cache-Control": "no-cache"}, media_type=kind)

    return Route(path, answer, methods=["GET"], include_in_schema=False)


def _json(status: int, body: bytes, **headers: str) -> Response:
    given = {**HEADERS, "Cache-Control": "no-store", **headers}
    return Response(body, status, given, media_type="application/json")


def _error(status: int, message: str) -> Response:
    challenge = {"WWW-Authenticate": "Bearer"} if status == UNAUTHORIZED else {}
    return _json(status, error_body(status, message), **challenge)


def _polled(record: logging.LogRecord) -> bool:
    """Returns False for the line of the access log about a request that the open page makes every second."""
    match record.args:
        case (_client, "GET", str(path), _version, 200):
            return not path.partition("?")[0].endswith(STATUS)
    return True
