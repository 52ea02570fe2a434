"""Stands in for a model hub, on the loopback interface and with faults.

It has what huggingface_hub requests for a download: the description of a repository with sizes and digests, and its
files. As on the real hub, large files are redirected to another host (here: another port), which serves ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)(/revision/(?P<revision>.+))?")
_FILE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


@dataclass
class Repository:
    """Holds the files of a repository, and who may see them."""

    files: dict[str, bytes]
    commit: str = COMMIT
    token: str | None = None
    """The token without which the repository is not shown."""
    gated: bool = False
    revisions: tuple[str, ...] = ("main",)
    large: int = 1000
    """Bytes from which files are stored outside of Git."""
    describe: Callable[[dict[str, Any]], Any] = lambda description: description
    """Changes the description of the repository before it is sent."""


@dataclass
class Request:
    """Describes a request that came in."""

    host: str
    """hub or cdn."""
    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass
class Hub:
    """Holds the repositories, the faults to make, and the requests that came."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next answers of the second host are cut off, in order."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers of the second host, in order. 0 stands for a regular answer."""
    ignores_ranges: bool = False
    changed: dict[str, bytes] = field(default_factory=dict)
    """Content that is sent in the place of that of a file."""
    silent: threading.Event = field(default_factory=threading.Event)
    """While it is set, the second host sends what it should cut off at, and then nothing more."""
    end: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    cdn_url: str = ""

    def downloads(self) -> list[Request]:
        """Returns the requests for the content of large files."""
        return [request for request in self.requests if request.host == "cdn"]

    def describe(self, name: str) -> Any:
        repository = self.repositories[name]
        siblings = []
        for file, content in repository.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            one: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": blob}
            if len(content) >= repository.large:
                sha256 = hashlib.sha256(content).hexdigest()
                one |= {"lfs": {"sha256": sha256, "size": len(content), "pointerSize": 130}, "blobId": "0" * 40}
            siblings.append(one)
        description = {"id": name, "modelId": name, "sha": repository.commit, "private": False, "siblings": siblings}
        return repository.describe(description)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    host: str

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append(Request(self.host, self.command, path, headers))
        if self.host == "cdn":
            return self.send_content(*path.removeprefix("/blobs/").split("|"))
        if match := _API.fullmatch(path):
            return self.send_description(match["repository"], match["revision"])
        if match := _FILE.fullmatch(path):
            return self.send_file(match["repository"], match["revision"], match["name"])
        return self.answer(404)

    do_HEAD = do_GET

    def send_description(self, name: str, revision: str | None) -> None:
        if self.is_visible(name, revision):
            description = self.hub.describe(name)
            body = description if isinstance(description, bytes) else json.dumps(description).encode()
            self.answer(200, body, {"Content-Type": "application/json"})

    def send_file(self, name: str, revision: str, file: str) -> None:
        if not self.is_visible(name, revision):
            return
        repository = self.hub.repositories[name]
        if file not in repository.files:
            self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        elif len(repository.files[file]) >= repository.large:
            place = urllib.parse.quote(f"{name}|{file}", safe="")
            self.answer(302, headers={"Location": f"{self.hub.cdn_url}/blobs/{place}"})
        else:
            self.answer(200, self.hub.changed.get(file, repository.files[file]))

    def is_visible(self, name: str, revision: str | None) -> bool:
        """Returns whether the repository is there for this client; otherwise answers as the hub does."""
        repository = self.hub.repositories.get(name)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given == "wrong":
            self.answer(401, headers={"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is not None and repository.gated:
            self.answer(401 if not given else 403, headers={"X-Error-Code": "GatedRepo"})
        elif repository is None or (repository.token is not None and given != repository.token):
            self.answer(401 if not given else 404, headers={"X-Error-Code": "RepoNotFound"})
        elif revision is not None and revision not in (*repository.revisions, repository.commit):
            self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def send_content(self, name: str, file: str) -> None:
        status = self.hub.statuses.pop(0) if self.hub.statuses else 0
        if status:
            return self.answer(status)
        whole = self.hub.changed.get(file, self.hub.repositories[name].files[file])
        begin = 0
        if (wanted := self.headers.get("Range")) and not self.hub.ignores_ranges:
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(whole) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(whole) - 1}/{len(whole)}")
        self.end_headers()
        rest = whole[begin:]
        if self.hub.cuts:
            rest = rest[: self.hub.cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(rest)
        self.wfile.flush()
        if self.hub.silent.is_set() and len(rest) < len(whole) - begin:
            self.hub.end.wait(60)

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Starts a hub without repositories, on two free ports of the loopback interface."""
    hub = Hub()
    servers = []
    for host in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"hub": hub, "host": host})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    try:
        yield hub
    finally:
        hub.end.set()
        for server in servers:
            server.shutdown()
            server.server_close()
