"""Starts servers for the tests with the real command, on a free port of the loopback interface."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
from processes import SCRIPTS, Child, tail

from tests.ports import free_port

COMMAND = str(SCRIPTS / "vllm-backplane")
VLLM = str(SCRIPTS / "vllm")
LIMITS = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--dtype", "float32")
"""Limits for servers with tiny models. Prompts of more than 64 tokens need several prefill chunks."""
START_SECONDS = 300
"""Seconds after which a server that is not ready counts as hanging."""


class Server(Child):
    """Runs a server with `vllm-backplane serve` or `vllm serve`. It is ready when the constructor returns."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        variables: Mapping[str, str | None] | None = None,
        command: str = COMMAND,
        warm: bool = True,
    ) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        # Requests to the loopback interface must not use the proxies of the environment.
        self.http = httpx.Client(base_url=self.address, timeout=300, trust_env=False)
        line = [command, "serve", *arguments, "--port", str(self.port)]
        # The option --device sets a variable before vLLM is imported.
        with_vllm = not any(argument.partition("=")[0] == "--device" for argument in arguments)
        given = variables if with_vllm else {"BACKPLANE_DEVICE": None, **(variables or {})}
        super().__init__(line, folder / "server.log", given, warm=warm, with_vllm=with_vllm)
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Server:
        return self

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            status = self.process.poll()
            assert status is None, f"the server ended with status {status}\n{tail(self.log)}"
            self.descendants()
            if self.healthy():
                return
            time.sleep(0.2)
        raise AssertionError(f"not ready after {START_SECONDS} s\n{tail(self.log)}")

    def healthy(self) -> bool:
        """Returns whether /health reports success."""
        try:
            return self.http.get("/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def client(self) -> openai.OpenAI:
        """Returns an OpenAI client of the server."""
        return openai.OpenAI(
            base_url=f"{self.address}/v1",
            api_key="none",
            max_retries=0,
            timeout=300,
            http_client=httpx.Client(timeout=300, trust_env=False),
        )

    def complete(self, prompt: Sequence[int], tokens: int, replica: int | None = None, **more: Any) -> dict[str, Any]:
        """Returns the choice of a greedy completion request; `replica` selects a data parallel rank.

        `more` is added to the body of the request.
        """
        request = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        response = self.http.post("/v1/completions", json=request | {"return_token_ids": True, **more}, headers=headers)
        assert response.status_code == 200, response.text
        return dict(response.json()["choices"][0])

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a Prometheus metric over the samples with these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            fits = all(f'{key}="{wanted}"' in series for key, wanted in labels.items())
            if series.partition("{")[0] == name and fits:
                total += float(value)
        return total
