"""Sends requests to a server with the OpenAI chat API, and yields the pieces of an answer as they arrive.

The client of the standard library is used: a conversation needs two kinds of requests, some over a Unix socket, and a
library for more would take longer to import than the first token takes.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_backplane.chat.endpoint import Endpoint
from vllm_backplane.errors import BackplaneError
from vllm_backplane.safe_text import one_line

MAX_LINE = 4 << 20
"""Bytes of one event. A longer one is no part of an answer."""
MAX_BODY = 1 << 20
"""Bytes that are read of a response other than a stream."""
MAX_MESSAGE = 300
"""Characters of a server's message that are shown."""


class ServerError(BackplaneError):
    """Reports that a server did not answer a request, and what to do."""


class ConnectionLost(ServerError):
    """Reports that no server was reached, or that it went away before the answer was complete."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Describes a model that a server serves."""

    name: str
    is_vllm: bool
    """Whether vLLM serves it, which accepts more parameters than the API has."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds what one event of a stream adds to the answer."""

    text: str = ""
    reasoning: str = ""
    finish: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


Pieces = Generator[Piece, None, None]


class Client:
    """Sends requests to one server."""

    def __init__(self, endpoint: Endpoint, api_key: str | None, seconds: float) -> None:
        """`seconds` is the longest time to wait for the next part of a response. Raises BackplaneError for a key that
        no header can hold."""
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise BackplaneError("the API key has characters that are not printable ASCII; correct it")
        self.endpoint = endpoint
        self._api_key = api_key
        self._seconds = seconds

    def is_healthy(self) -> bool:
        """Returns whether the server is up: whether it answers at all, and with success."""
        try:
            with self._response("GET", "/health") as response:
                return response.status == 200
        except ServerError:
            return False

    def models(self) -> list[ServedModel]:
        """Returns the models that the server serves. Raises ServerError."""
        with self._response("GET", "/v1/models") as response:
            body = self._read_json(response)
        try:
            found = [ServedModel(str(one["id"]), one.get("owned_by") == "vllm") for one in body["data"]]
        except (KeyError, TypeError, AttributeError, RecursionError):
            found = []
        if not found:
            raise ServerError(f"{self.endpoint.shown} lists no models; give the address of an OpenAI-compatible server")
        return found

    def stream(self, model: ServedModel, messages: list[dict[str, str]], more: Mapping[str, Any]) -> Pieces:
        """Yields the pieces of the answer to a conversation. Raises ServerError.

        To stop the answer, close the generator: the connection closes, and vLLM then aborts the request.
        """
        usage = {"include_usage": True} | ({"continuous_usage_stats": True} if model.is_vllm else {})
        body = {**more, "model": model.name, "messages": messages, "stream": True, "stream_options": usage}
        with self._response("POST", "/v1/chat/completions", json.dumps(body).encode()) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise self._not_understood(f"it answered with {kind} in place of a stream")
            finished = False
            while line := response.readline(MAX_LINE):
                if not line.endswith(b"\n"):
                    break
                field, _, value = line.partition(b":")
                if field != b"data":
                    continue  # a comment that keeps the connection open, or the name of an event
                if value.strip() == b"[DONE]":
                    return
                piece = self._piece(value)
                finished |= bool(piece.finish)
                yield piece
            if not finished:
                raise ConnectionLost(
                    f"the connection to {self.endpoint.shown} ended in the middle of the answer; ask again, or see the "
                    "server's log"
                )

    def _piece(self, value: bytes) -> Piece:
        try:
            event = json.loads(value)
            if "error" in event:
                raise ServerError(f"the server stopped the answer: {_message(event)}; its log has the reason")
            usage = event.get("usage") or {}
            tokens = {name: _count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")}
            choice: dict[str, Any] = (event.get("choices") or [{}])[0]
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            text, finish = delta.get("content") or "", choice.get("finish_reason") or ""
            return Piece(str(text), str(reasoning), str(finish), **tokens)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as fault:
            raise self._not_understood(f"it sent {one_line(value.decode(errors='replace'), 60)!r}") from fault

    @contextmanager
    def _response(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """Yields the response to a request if its status is 200, and closes the connection afterwards."""
        headers = {"Accept": "application/json, text/event-stream"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        shown = self.endpoint.shown
        try:
            connection = self.endpoint.connect()
        except (OSError, UnicodeError) as fault:
            raise ConnectionLost(
                f"cannot connect to {shown}: {one_line(str(fault))}; start a server, or correct the address"
            ) from fault
        try:
            connection.sock.settimeout(self._seconds)
            connection.request(method, self.endpoint.prefix + path, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response)
            yield response
        except TimeoutError as fault:
            raise ConnectionLost(
                f"{shown} sent nothing for {self._seconds:g} s; ask again, or raise --timeout"
            ) from fault
        except http.client.HTTPException as fault:
            if isinstance(fault, ConnectionError | http.client.IncompleteRead):
                raise self._lost(fault) from fault
            raise self._not_understood(f"it does not speak HTTP ({type(fault).__name__})") from fault
        except OSError as fault:
            raise self._lost(fault) from fault
        finally:
            connection.close()

    def _lost(self, fault: Exception) -> ConnectionLost:
        return ConnectionLost(
            f"the connection to {self.endpoint.shown} was lost ({one_line(str(fault))}); see the server's log"
        )

    def _not_understood(self, reason: str) -> ServerError:
        return ServerError(
            f"{self.endpoint.shown} is not understood: {reason}; give the address of an OpenAI-compatible server"
        )

    def _read_json(self, response: http.client.HTTPResponse) -> Any:
        try:
            return json.loads(response.read(MAX_BODY))
        except (ValueError, RecursionError) as fault:
            raise self._not_understood("it answered with something other than JSON") from fault

    def _refusal(self, response: http.client.HTTPResponse) -> ServerError:
        """Returns the error for a response with another status than 200."""
        status, text = response.status, response.read(MAX_BODY).decode(errors="replace")
        try:
            message = _message(json.loads(text))
        except (ValueError, TypeError, AttributeError, RecursionError):
            message = one_line(text, MAX_MESSAGE) or response.reason
        if status in (401, 403):
            return ServerError(
                f"{self.endpoint.shown} refused the API key ({status}); set VLLM_API_KEY to the server's key, or "
                "give --api-key"
            )
        if status == 404:
            return ServerError(f"{self.endpoint.shown} has no such model, or no chat API (404): {message}")
        if status == 400 and "maximum context length" in message:
            return ServerError(
                f"the conversation is longer than the model's context; begin anew (/clear), or ask less ({message})"
            )
        if status >= 500:
            return ServerError(f"the server failed ({status}): {message}; its log has the reason")
        return ServerError(f"the server refused the request ({status}): {message}")


def _message(body: Any) -> str:
    """Returns the message of an error in a response, on one line."""
    error = body.get("error", body)
    found = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return one_line(found if isinstance(found, str) else json.dumps(body), MAX_MESSAGE)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None
