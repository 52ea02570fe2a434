"""Sends mixed requests to an OpenAI server and judges each answer.

Requests are short or long, stream, ask for several choices, are aborted, or are malformed.

A request is lost if it gets no complete answer of its kind. Requests are drawn from a seed, so two runs send the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

TEXT = (
    "In the morning a cold wind came over the river, and the small market below the bridge was quiet. Seven people "
    "stood under the red roof with a letter in hand, because the machine had stopped before the winter and nobody "
    "knew the number of the engine."
)
"""Words of which prompts are drawn."""

SHARES = {"short": 40, "long": 8, "stream": 20, "two choices": 12, "aborted": 12, "malformed": 8}
"""Kinds of requests and their shares in percent."""

EMPTY_ANSWER = b'{"type": "message", "role": "assistant", "id": "1", "status": "completed", "content": []}'
BROKEN: tuple[tuple[str, str, bytes], ...] = (
    ("not JSON", "/v1/completions", b'{"model": "soak", "prompt": '),
    ("not an object", "/v1/completions", b"[1, 2, 3]"),
    ("no prompt", "/v1/chat/completions", b'{"model": "soak"}'),
    ("an unknown model", "/v1/completions", b'{"model": "other", "prompt": "x"}'),
    ("a negative length", "/v1/completions", b'{"model": "soak", "prompt": "x", "max_tokens": -1}'),
    ("a temperature below zero", "/v1/completions", b'{"model": "soak", "prompt": "x", "temperature": -3}'),
    ("top_p above one", "/v1/completions", b'{"model": "soak", "prompt": "x", "top_p": 7}'),
    ("tokens outside of the vocabulary", "/v1/completions", b'{"model": "soak", "prompt": [99999999]}'),
    ("negative tokens", "/v1/completions", b'{"model": "soak", "prompt": [-5]}'),
    ("an unknown role", "/v1/chat/completions", b'{"model": "soak", "messages": [{"role": 5}]}'),
    ("not UTF-8", "/v1/completions", b'{"model": "soak", "prompt": "\xff\xfe"}'),
    ("deep JSON", "/v1/completions", b'{"model": "soak", "prompt": ' + b"[" * 400 + b"]" * 400 + b"}"),
    ("an unknown path", "/v1/nowhere", b"{}"),
    (
        "an assistant without text",
        "/v1/responses",
        b'{"model": "soak", "input": [%s]}' % EMPTY_ANSWER,
    ),
    ("a broken grammar", "/v1/completions", b'{"model": "soak", "prompt": "x", "structured_outputs": {"regex": "("}}'),
)
"""Malformed requests: name, path, body. The status must be one of 4xx."""


@dataclass
class Tally:
    """Counts what became of the requests."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """One text for each request that was lost or answered wrongly."""
    server_errors: list[str] = field(default_factory=list)
    """One text for each answer with a status of 500 or more."""
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    """Seconds of complete answers."""


class Load:
    """Draws and sends requests. `longest` is the number of words of a long prompt."""

    def __init__(self, address: str, longest: int, seed: int) -> None:
        self.address = address
        self.longest = longest
        self._seed, self._sent = seed, 0
        self.tally = Tally()
        self._senders: dict[str, Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]] = {
            "short": self._short,
            "long": self._long,
            "stream": self._stream,
            "two choices": self._two_choices,
            "aborted": self._aborted,
            "malformed": self._malformed,
        }
        assert self._senders.keys() == SHARES.keys()

    async def send(self, number: int, concurrency: int) -> None:
        """Sends `number` requests, `concurrency` at a time, with fresh connections."""
        # Each request has a generator of its own: the order of the answers must not change the requests.
        left = iter([random.Random(f"{self._seed}-{self._sent + place}") for place in range(number)])
        self._sent += number
        # Requests to the loopback interface must not use the proxies of the environment.
        async with httpx.AsyncClient(base_url=self.address, timeout=600, trust_env=False) as client:

            async def worker() -> None:
                for chance in left:
                    [kind] = chance.choices(list(SHARES), list(SHARES.values()))
                    self.tally.sent[kind] += 1
                    try:
                        await self._senders[kind](client, chance)
                    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                        self.tally.lost.append(f"{kind}: {type(error).__name__}: {error}")

            await asyncio.gather(*(worker() for _ in range(concurrency)))

    @staticmethod
    def _text(chance: random.Random, words: int) -> str:
        return " ".join(chance.choices(TEXT.split(), k=words))

    def _body(self, chance: random.Random, words: int, tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": chance.choice((0, 0.7, 1.0)), "seed": chance.randrange(1 << 30)}
        return {"model": "soak", "prompt": self._text(chance, words), "max_tokens": tokens, **sampling, **more}

    def _require_choices(self, kind: str, response: httpx.Response, number: int, started: float) -> None:
        """Counts a response, and records it as lost unless it has `number` finished choices."""
        self._count(kind, response)
        if response.status_code != 200:
            self.tally.lost.append(f"{kind}: status {response.status_code}: {response.text[:200]}")
            return
        answer = response.json()
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        if len(reasons) != number or not all(reason in ("stop", "length") for reason in reasons):
            self.tally.lost.append(f"{kind}: {number} choices were requested, and these came: {reasons}")
        self.tally.tokens += answer["usage"]["completion_tokens"]
        self.tally.latencies.append(time.monotonic() - started)

    def _count(self, kind: str, response: httpx.Response) -> None:
        self.tally.statuses[response.status_code] += 1
        if response.status_code >= 500:
            self.tally.server_errors.append(f"{kind}: status {response.status_code}")

    async def _short(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        started = time.monotonic()
        text = self._text(chance, chance.randint(1, 16))
        body = {"model": "soak", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        self._require_choices("short", await client.post("/v1/chat/completions", json=body), 1, started)

    async def _long(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        started = time.monotonic()
        body = self._body(chance, chance.randint(self.longest // 2, self.longest), 8)
        self._require_choices("long", await client.post("/v1/completions", json=body), 1, started)

    async def _two_choices(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        started = time.monotonic()
        body = self._body(chance, chance.randint(1, 24), 8, n=2, temperature=1.0)
        self._require_choices("two choices", await client.post("/v1/completions", json=body), 2, started)

    async def _stream(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        started, finished, events, reasons = time.monotonic(), False, 0, []
        body = self._body(chance, chance.randint(1, 24), 12, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            self._count("stream", response)
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    events += 1
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
                finished = finished or line == "data: [DONE]"
        if not finished or not events or reasons not in (["stop"], ["length"]):
            status = response.status_code
            self.tally.lost.append(f"stream: status {status}, {events} events, finished: {finished}, {reasons}")
        self.tally.tokens += events
        self.tally.latencies.append(time.monotonic() - started)

    async def _aborted(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        """Disconnects before the answer is complete: in a stream after some events, or while the server computes."""
        words = chance.randint(1, self.longest // 2)
        if chance.random() < 0.5:
            left = chance.randint(1, 5)
            async with client.stream(
                "POST", "/v1/completions", json=self._body(chance, words, 64, stream=True)
            ) as response:
                self._count("aborted", response)
                if response.status_code != 200:
                    self.tally.lost.append(f"aborted: status {response.status_code}")
                async for line in response.aiter_lines():
                    left -= line.startswith("data: ")
                    if not left:
                        break
            return
        patience = chance.uniform(0.01, 0.5)
        try:
            response = await client.post("/v1/completions", json=self._body(chance, words, 64), timeout=patience)
        except httpx.TimeoutException:
            return
        self._require_choices("aborted", response, 1, time.monotonic() - patience)

    async def _malformed(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        name, path, body = chance.choice(BROKEN)
        response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        self._count(f"malformed, {name}", response)
        if not 400 <= response.status_code < 500:
            self.tally.lost.append(f"malformed, {name}: status {response.status_code}: {response.text[:200]}")
