"""Tests what the routes of the page answer, and to whom, with the application that vLLM would add them to."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.middleware.cors import CORSMiddleware

from vllm_backplane.page import plugin as plugin_module
from vllm_backplane.page.access import Access
from vllm_backplane.page.live_figures import LiveFigures, Value
from vllm_backplane.page.plugin import PagePlugin
from vllm_backplane.page.routes import FILES, FOLDER, HEADERS, PATHS, STATUS, Page

VALUES: list[Value] = [("vllm:num_requests_running", {"engine": "0"}, 3.0)]


def application(*keys: str, root_path: str = "", opened: bool = True) -> FastAPI:
    """Returns an application with the page, which lets all origins read its answers, as vLLM 0.30 does."""
    app, page = FastAPI(root_path=root_path), Page()
    app.router.routes.extend(page.routes())
    if opened:
        page.open(Access(keys), {"model": {"names": ["tiny"]}}, LiveFigures(lambda: VALUES))
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    return app


def client(*keys: str, **options: Any) -> TestClient:
    return TestClient(application(*keys, **options), follow_redirects=False)


def test_every_file_is_served_and_no_other() -> None:
    assert {name for name, _kind in FILES.values()} == {path.name for path in FOLDER.iterdir()}
    browser = client()
    for path, (name, kind) in FILES.items():
        answer = browser.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        assert answer.content == (FOLDER / name).read_bytes()
    for path in ("/backplane/", "/backplane/../page.css", "/backplane/%2e%2e/routes.py", "/backplane/routes.py"):
        assert browser.get(path).status_code == 404


def test_the_files_need_no_key_and_contain_no_data() -> None:
    with_key, without = client("secret"), client()
    for path in FILES:
        assert with_key.get(path).content == without.get(path).content


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_the_headers_that_confine_the_page(path: str) -> None:
    for browser in (client(), client("secret"), client(opened=False)):
        answer = browser.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_the_policy_allows_only_what_the_server_itself_serves() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


UNSAFE = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\bFunction\(|https?:"
"""What would turn a text into elements or code, or name another host."""


@pytest.mark.parametrize("name", [name for name, _kind in FILES.values()])
def test_no_file_makes_elements_of_texts_or_names_another_host(name: str) -> None:
    text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")  # names a kind of element
    assert re.findall(UNSAFE, text) == []


def test_the_page_has_nothing_inline_and_only_relative_addresses() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="backplane/page.js">']
    assert re.findall(r"\son\w+=|\sstyle=|<style", page) == []
    addresses = re.findall(r"(?:href|src)=\"([^\"]*)\"", page)
    assert {address.partition("/")[0] for address in addresses} == {"backplane", "#question", "#status"}
    for name in ("page.js", "chat.js", "status.js"):
        requested = re.findall(r"request\(\"([^\"]*)\"", (FOLDER / name).read_text())
        assert not [address for address in requested if address.startswith("/")], "a prefix of a proxy would be lost"


def test_methods_that_only_read_are_answered() -> None:
    browser = client()
    for path in PATHS:
        assert browser.head(path).status_code == 200
        assert browser.head(path).content == b""
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert browser.request(method, path).status_code == 405


def test_the_status() -> None:
    answer = client().get(STATUS)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    found = answer.json()
    assert found["facts"] == {"model": {"names": ["tiny"]}}
    assert found["live"]["requests"]["running"] == 3.0
    assert found["live"]["steps"] is None


def test_the_status_needs_the_key_of_the_server() -> None:
    browser = client("first", "second")
    refused: list[dict[str, str]] = [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer firs"},
        {"Authorization": "Bearer first "},
        {"Authorization": "Basic first"},
        {"Authorization": "first"},
        {"X-API-Key": "first"},
    ]
    for headers in refused:
        answer = browser.get(STATUS, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), headers
        assert "API key" in answer.json()["error"]["message"]
        assert "tiny" not in answer.text
    for authorization in ("Bearer first", "bearer first", "Bearer second"):
        assert browser.get(STATUS, headers={"Authorization": authorization}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
)
def test_pages_of_other_origins_are_refused(headers: dict[str, str]) -> None:
    """Without a key too: the application here lets every origin read what it answers."""
    for browser in (client(), client("secret")):
        answer = browser.get(STATUS, headers={**headers, "Authorization": "Bearer secret"})
        assert answer.status_code == 403
        assert "tiny" not in answer.text
    own = client().get(STATUS, headers={"Sec-Fetch-Site": "same-origin"})
    assert own.status_code == 200


@pytest.mark.parametrize(
    ("given", "variable", "keys"),
    [
        (["a", "b"], "c", ("a", "b")),
        (None, "c", ("c",)),
        ([], "c", ("c",)),
        (None, "", ()),
        (None, None, ()),
        ([""], "c", ()),  # vLLM takes the option, and then no key
    ],
)
def test_the_keys_are_those_that_vllm_accepts(
    given: list[str] | None, variable: str | None, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    assert Access.of_server(SimpleNamespace(api_key=given)).keys == keys


def test_before_the_server_is_up_there_is_no_status() -> None:
    answer = client("secret", opened=False).get(STATUS)
    assert answer.status_code == 503


@pytest.mark.parametrize("path", ["/", "/backplane/page.js", STATUS])
def test_a_prefix_is_accepted_with_and_without_a_proxy_that_removes_it(path: str) -> None:
    browser = client(root_path="/prefix")
    assert browser.get(path).status_code == 200
    assert browser.get(f"/prefix{path}").status_code == 200


def test_a_prefix_without_a_slash_is_redirected() -> None:
    """Otherwise the relative addresses of the page would lose the prefix."""
    answer = client(root_path="/prefix").get("/prefix")
    assert answer.status_code == 307
    assert answer.headers["location"].endswith("/prefix/")


def test_only_failures_of_polls_are_in_the_access_log() -> None:
    client()

    def is_logged(method: str, path: str, status: int) -> bool:
        arguments = ("127.0.0.1:1", method, path, "1.1", status)
        record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)
        return bool(logging.getLogger("uvicorn.access").filter(record))

    assert not is_logged("GET", STATUS, 200)
    assert not is_logged("GET", f"/prefix{STATUS}?x=1", 200)
    assert is_logged("GET", STATUS, 401)
    assert is_logged("POST", STATUS, 200)
    assert is_logged("GET", "/", 200)


class OtherPlatform:
    pass


class OurPlatform:
    is_backplane = True


@pytest.fixture
def on_backplane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_module, "current_platform", OurPlatform())


def test_on_another_platform_nothing_is_added(
    monkeypatch: pytest.MonkeyPatch, vllm_log: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(plugin_module, "current_platform", OtherPlatform())
    app, plugin = FastAPI(), PagePlugin()
    before = list(app.routes)
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(object(), app.state, SimpleNamespace()))
    assert app.routes == before
    assert vllm_log() == ["The page of Backplane is not served: vLLM runs on another platform."]


@pytest.mark.parametrize("path", ["/", STATUS])
def test_a_path_of_somebody_else_is_not_taken(path: str, on_backplane: None, vllm_log: Callable[[], list[str]]) -> None:
    app = FastAPI()
    app.get(path)(lambda: "theirs")
    PagePlugin().attach_router(app)
    browser = TestClient(app)
    assert browser.get(path).json() == "theirs"
    assert browser.get("/backplane/page.js").status_code == 404
    [line] = vllm_log()
    assert line.startswith(f"The page of Backplane is not served: {path} belongs to")


def test_the_plugin_has_the_form_that_vllm_expects(on_backplane: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    from vllm_backplane import register_page

    plugin = register_page()
    assert isinstance(plugin, EndpointPlugin)
    assert plugin.name == "backplane_page"
    assert "generate" in plugin.required_tasks and "embed" in plugin.required_tasks
    assert "render" not in plugin.required_tasks, "that server has no engine"

    async def facts(*_given: Any) -> dict[str, Any]:
        return {"unknown": []}

    monkeypatch.setattr(plugin_module, "server_facts", facts)
    app = FastAPI()
    plugin.attach_router(app)
    assert TestClient(app).get(STATUS).status_code == 503
    asyncio.run(plugin.init_state(object(), app.state, SimpleNamespace(api_key=["k"])))
    assert TestClient(app).get(STATUS).status_code == 401
