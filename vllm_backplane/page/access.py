"""Decides which requests for the status of a server are answered: those with its API key, from its own page.

vLLM examines the key of a few path prefixes only, and some releases let the pages of every origin read all responses.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNAUTHORIZED, FORBIDDEN = 401, 403
OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site for requests of the page itself, and of a user who enters an address."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Describes why a request is not answered."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Access:
    """Holds the API keys of a server. Without any, every request from its own page is answered."""

    keys: tuple[str, ...] = ()

    @classmethod
    def of_server(cls, args: Any) -> Access:
        """Returns the keys that vLLM's own middleware accepts: those of --api-key, or else that of VLLM_API_KEY."""
        from vllm import envs

        return cls(tuple(key for key in (args.api_key or [envs.VLLM_API_KEY]) if key))

    def refusal(self, headers: Mapping[str, str]) -> Refusal | None:
        """Returns why a GET request with these headers is refused, or None. Names of headers are in lower case."""
        # A browser adds Origin to a GET request only if it comes from another origin.
        if "origin" in headers or headers.get("sec-fetch-site", "none") not in OWN_SITES:
            return Refusal(FORBIDDEN, "The status is for the page of this server, and for no page of another origin.")
        if self.keys and not self._has_key(headers.get("authorization", "")):
            return Refusal(UNAUTHORIZED, "The status needs the API key of this server: Authorization: Bearer KEY.")
        return None

    def _has_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # All keys are compared, whichever fits, so that the time does not depend on it.
        fitting = [hmac.compare_digest(given.encode(), key.encode()) for key in self.keys]
        return scheme.lower() == "bearer" and any(fitting)
