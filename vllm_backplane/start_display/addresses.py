"""Composes the addresses of a server, and a request to it, for people."""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Mapping
from typing import Any

QUESTION = "What is the capital of Japan?"
ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}  # compared, not listened on
"""Addresses to listen on that stand for all interfaces, with one that a client on this host can connect to."""

_BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}]},
    "/v1/completions": {"prompt": "The capital of Japan is", "max_tokens": 16},
    "/v1/embeddings": {"input": QUESTION},
}
"""Requests by path. Of a server that has none of these paths, the list of its models is requested."""


def base_of(facts: Mapping[str, Any]) -> str:
    """Returns the address of a server without a path of the API. Facts are those of `http/served_addresses.py`."""
    scheme = "https" if facts.get("tls") else "http"
    root = str(facts.get("root_path") or "").rstrip("/")
    if facts.get("uds"):
        return f"{scheme}://localhost{root}"
    host = str(facts.get("host") or "")
    return f"{scheme}://{ANYWHERE.get(host) or _in_url(host)}:{facts['port']}{root}"


def _in_url(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def address_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the names and addresses of what the server offers."""
    base = base_of(facts)
    found = [("API", f"{base}/v1")]
    if facts.get("page"):
        found.append(("page", f"{base}/"))
    if facts.get("metrics"):
        found.append(("metrics", f"{base}/metrics"))
    if facts.get("uds"):
        found.append(("socket", str(facts["uds"])))
    elif str(facts.get("host") or "") in ANYWHERE:
        found.append(("", "other hosts can connect too: the server listens on all interfaces"))
    return found


def curl_lines(facts: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a curl command that works as it is, for a shell."""
    command = ["curl"]
    if facts.get("uds"):
        command += ["--unix-socket", shlex.quote(str(facts["uds"]))]
    if facts.get("tls"):
        command.append("--insecure")  # certificates are rarely issued for a local address
    path = str(facts.get("path") or "")
    body = _BODIES.get(path)
    command.append(shlex.quote(f"{base_of(facts)}{path if body else '/v1/models'}"))
    if key := facts.get("key"):
        command += ["-H", f'"Authorization: Bearer {key}"']
    if body is None:
        return [" ".join(command)]
    # JSON in ASCII keeps the command free of characters that a terminal or a shell would execute.
    content = json.dumps({"model": str(facts.get("model") or ""), **body})
    return [" ".join([*command, "-H", "'Content-Type: application/json'", "\\"]), f"  -d {shlex.quote(content)}"]
