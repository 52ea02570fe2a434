"""Tests the page of a server in a real browser: chat, status under load, hostile texts, the API key, a prefix."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, needs_browser
from server import VLLM, Server

pytestmark = [pytest.mark.server, pytest.mark.models, needs_browser]

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
"""What would run a script if it became elements."""
KEYS = ("first-key", "second-key")
PREFIX = "/a/prefix"
LIMITS = ("--max-model-len", "512", "--max-num-seqs", "2", "--max-num-batched-tokens", "128", "--dtype", "float32")
ADD_TO_REQUESTS = """
const [more] = arguments, original = window.original ?? window.fetch;
window.original = original;
window.sent = [];
window.fetch = (address, options) => {
  if (!options?.body) return original(address, options);
  const body = {...JSON.parse(options.body), ...more};
  window.sent.push(body);
  return original(address, {...options, body: JSON.stringify(body)});
};
"""
"""Records the requests of the page, and adds keys to them: the page has no field for every parameter of vLLM."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts a server of the default model, whose name is hostile."""
    with Server(
        tmp_path_factory.mktemp("server"),
        *("smollm2", "--served-model-name", HOSTILE, *LIMITS),
        *("--kv-cache-memory-bytes", "64M"),  # small, so that the requests of a test take a share that can be seen
    ) as running:
        yield running


@pytest.fixture
def page(server: Server, browser: Browser) -> Iterator[Browser]:
    """Opens the page, and checks after the test that no script failed and that the policy has blocked nothing."""
    open_page(browser, server.address + "/")
    yield browser
    assert browser.errors() == []
    assert server.process.poll() is None


def open_page(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait(lambda: browser.text("#connection") == "connected", "the page is connected")


def parameters(browser: Browser, **values: str) -> None:
    """Sets parameters of the chat, as a user who opens them first."""
    if not browser.run("return document.querySelector('#chat-form details').open"):
        browser.click("#chat-form summary")
    for name, value in values.items():
        browser.run("document.getElementById(arguments[0]).value = ''", name.replace("_", "-"))
        browser.type(f"#{name.replace('_', '-')}", value)


def ask(browser: Browser, question: str) -> str:
    """Sends a question by the keyboard, and returns the answer when it is complete."""
    before = browser.count(".message.answer")
    browser.type("#question", question, key="enter")
    browser.wait(lambda: is_answered(browser, before) or browser.text("#chat-error"), "the answer")
    assert browser.text("#chat-error") == ""
    return browser.text(".message.answer:last-child .text")


def is_answered(browser: Browser, before: int = 0) -> bool:
    return browser.count(".message.answer") > before and bool(browser.text(".message.answer:last-child .figures"))


def row(browser: Browser, table: str, label: str) -> str:
    """Returns the value beside a label in a table."""
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tr`)]"
        ".find(row => row.cells[0].textContent.includes(arguments[1]))?.cells[1].textContent ?? ''"
    )
    return str(browser.run(script, table, label))


@pytest.mark.feature("Serving: the page in a browser: chat", "cpu")
def test_an_answer_is_streamed(page: Browser) -> None:
    parameters(page, temperature="0", max_tokens="24")
    page.run(
        "window.seen = 0; new MutationObserver(changes => { window.seen += changes.length; })"
        ".observe(document.getElementById('messages'), {subtree: true, characterData: true})"
    )
    assert "Tokyo" in ask(page, "What is the capital of Japan?")
    assert page.run("return window.seen") > 3, "the answer came in pieces"
    assert "tokens/s · first after" in page.text(".message.answer .figures")
    assert page.text("#question") == ""
    assert page.run("return document.activeElement.id") == "question"
    # A screen reader gets the answer once: the conversation itself announces nothing.
    assert page.run("return document.getElementById('messages').ariaLive") == "off"
    assert "Tokyo" in page.text("#announcement")


def test_parameters_and_the_conversation_are_sent(page: Browser) -> None:
    page.run(ADD_TO_REQUESTS, {})
    parameters(page, temperature="0.5", top_p="0.9", max_tokens="3", system="You count.")
    first = ask(page, "Count from one to ten.")
    assert page.text(".message.answer .figures").startswith("3 tokens · ")
    assert page.text(".message.answer .figures").endswith("ended at the limit of tokens")
    ask(page, "Go on.")
    [_, sent] = page.run("return window.sent")
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.5, 0.9, 3)
    assert sent["messages"] == [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "Count from one to ten."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Go on."},
    ]
    page.click("#clear")
    assert page.count(".message") == 0
    parameters(page, temperature="7")
    page.type("#question", "Not sent", key="enter")
    assert page.count(".message") == 0, "a parameter that is not valid is shown, and nothing is sent"


@pytest.mark.parametrize("how", ["escape", "button"])
def test_an_answer_can_be_stopped(page: Browser, server: Server, how: str) -> None:
    page.run(ADD_TO_REQUESTS, {"ignore_eos": True})
    parameters(page, max_tokens="450")
    page.type("#question", "Tell a long story.", key="enter")
    page.wait(lambda: page.text(".message.answer .text"), "the beginning of the answer")
    if how == "escape":
        page.press("escape")
    else:
        page.click("#stop")
    page.wait(lambda: is_answered(page), "the end of the answer")
    assert page.text(".message.answer .figures").endswith("· stopped")
    assert page.text("#announcement").startswith("Stopped. ")
    page.wait(lambda: server.metric("vllm:num_requests_running") == 0, "the server ends the request")
    assert page.text("#chat-error") == ""


def test_hostile_names_and_answers_stay_text(page: Browser, server: Server) -> None:
    answer = f"<script>document.title='owned'</script>{HOSTILE}\u202e**x**"
    page.run(ADD_TO_REQUESTS, {"structured_outputs": {"choice": [answer]}})
    parameters(page, max_tokens="200")
    assert ask(page, f"{HOSTILE}?") == answer
    assert page.text(".message.own .text") == f"{HOSTILE}?"
    assert page.text("#served-model") == row(page, "server", "Model") == page.text("#model option") == HOSTILE
    assert page.run("return document.title") == f"{HOSTILE} \u2013 Backplane"
    elements = page.run("return [...document.querySelectorAll('main *, header *')].map(each => each.localName)")
    assert elements.count("img") == 1, "the icon"
    assert "script" not in elements


def test_an_error_of_the_server_is_one_line(page: Browser) -> None:
    page.run(ADD_TO_REQUESTS, {"model": f"nobody\n{HOSTILE}"})
    page.type("#question", "Hello", key="enter")
    page.wait(lambda: page.text("#chat-error"), "the error")
    assert "does not exist" in page.text("#chat-error") and "\n" not in page.text("#chat-error")
    assert page.count(".message") == 0
    assert page.run("return document.getElementById('question').value") == "Hello", "it can be sent again"
    # The browser reports the failed request itself.
    assert [line for line in page.errors() if "404" not in line] == []


@pytest.mark.feature("Serving: the page in a browser: status", "cpu")
def test_the_status_moves_under_load(page: Browser, server: Server) -> None:
    """Tests charts and tables with more requests than run at once. The requests end when the page has shown them."""
    enough = threading.Event()
    request = {"model": HOSTILE, "prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}

    def load() -> None:
        with server.http.stream("POST", "/v1/completions", json=request) as response:
            for _piece in response.iter_raw():
                if enough.is_set():
                    return

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        page.wait(lambda: row(page, "load", "Running") == "2" and row(page, "load", "Waiting") == "2", "the requests")
        page.wait(lambda: row(page, "speed", "Generated") not in ("", "\u2013", "0.0"), "the speed")
        assert float(row(page, "cache", "In use").removesuffix(" %")) > 0
        page.wait(lambda: page.run("return document.querySelector('#load-chart').dataset.samples") > "2", "samples")
        heights = page.run(
            "return ['speed', 'load', 'cache'].map(id => document.querySelector(`#${id}-chart .one polyline`)"
            ".getAttribute('points').split(' ').map(point => +point.split(',')[1]))"
        )
        assert all(min(line) < 59 for line in heights), "59 is the line of zero"
        for part in ("schedule", "inputs", "forward", "sample"):
            assert float(row(page, "step", part).removesuffix(" ms").replace(",", "")) > 0
        assert row(page, "memory", "In use").endswith("iB")
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    page.wait(lambda: row(page, "load", "Running") == "0", "the end of the requests")
    before = int(row(page, "speed", "since the start").replace(",", ""))
    assert before > 0


FIGURES = """
const original = window.original ?? window.fetch;
window.original = original;
let steps = 0;
window.fetch = async (address, options) => {
  const answer = await original(address, options);
  if (address !== "backplane/status") return answer;
  const found = await answer.json();
  steps += 10;
  const seconds = {schedule: steps * .001, inputs: steps * .002, forward: steps * .016, sample: steps * .001};
  const eager = {"a <b>prefill</b>": steps * .1};
  found.live.steps = {seconds, eager, count: steps, scheduled: steps, replayed: steps * .9};
  found.live.memory = [["0", 8, 6], ["1", 4, null]].map(
    ([rank, used, peak]) => ({rank, total: 16 * 2 ** 30, used: used * 2 ** 30, peak: peak && peak * 2 ** 30}));
  return new Response(JSON.stringify(found));
};
"""
"""Adds known figures to the status, of two ranks."""


def test_step_time_and_memory_are_taken_apart(page: Browser) -> None:
    """Tests with known figures what the page computes. Which figures a server has depends on its options."""
    page.run(FIGURES)
    page.wait(lambda: row(page, "step", "forward") == "16.00 ms", "the parts of a step")
    assert [row(page, "step", part) for part in ("schedule", "inputs", "sample")] == ["1.00 ms", "2.00 ms", "1.00 ms"]
    assert row(page, "step", "together") == "20.00 ms"
    assert row(page, "step", "replayed") == "90.0 %"
    assert int(row(page, "step", "eager: a <b>prefill</b>").replace(",", "")) > 0
    widths = page.run("return [...document.querySelectorAll('#step-bar rect')].map(each => each.getAttribute('width'))")
    assert widths == ["5.00", "10.00", "80.00", "5.00"]
    memory = page.run(
        "return [...document.querySelectorAll('#memory tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert memory == [
        *(["Rank 0: In use", "8.00 GiB"], ["Rank 0: Peak", "6.00 GiB"], ["Rank 0: Total", "16.00 GiB"]),
        *(["Rank 1: In use", "4.00 GiB"], ["Rank 1: Total", "16.00 GiB"]),
    ]
    used = page.run("return [...document.querySelectorAll('#memory rect')].map(each => each.getAttribute('width'))")
    assert used == ["50.00", "25.00"]


def test_what_the_status_shows_of_the_server(page: Browser, server: Server) -> None:
    assert row(page, "server", "Device") == "cpu"
    assert row(page, "server", "Chosen because") == "requested by BACKPLANE_DEVICE"
    assert row(page, "server", "Format").startswith("GGUF, ")
    assert row(page, "server", "vLLM") == page.run(
        "return fetch('version').then(answer => answer.json()).then(found => found.version)"
    )
    assert page.count("#operators tbody tr") > 40
    assert "by kernel" in page.text("#operators-summary")
    assert row(page, "patches", "serve_http") == "applied"
    assert "endpoint plugin" not in server.text(), "vLLM warns of plugins that are installed and not loaded"
    assert row(page, "options", "device") == "cpu (BACKPLANE_DEVICE)"
    assert row(page, "configuration", "sequences per step") == "2"


def test_the_page_can_be_used_without_a_mouse_and_without_seeing_it(page: Browser) -> None:
    fields = page.run(
        "return [...document.querySelectorAll('input, textarea, select')].filter(each => !each.labels.length).length"
    )
    assert fields == 0, "every field has a label"
    tables = page.run("return [...document.querySelectorAll('table[id]')].filter(each => !each.caption).length")
    assert tables == 0, "every table has a caption"
    reached, outlines = [], set()
    for _ in range(9):
        page.press("tab")
        reached.append(page.run("return document.activeElement.id || document.activeElement.textContent"))
        outlines.add(page.run("return getComputedStyle(document.activeElement).outlineStyle"))
    assert reached[:2] == ["Skip to the chat", "Skip to the status"]
    assert {"model", "clear", "question", "send", "Parameters"} <= set(reached)
    assert outlines == {"solid"}, "the focus can be seen"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_texts_can_be_read_and_nothing_is_cut_off(page: Browser, scheme: str, width: int) -> None:
    page.resize(width, 900)
    page.emulate("prefers-color-scheme", scheme)
    [content, window] = page.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert content <= window, "nothing makes the page scroll sideways"
    faint = page.run(
        """
        const light = color => {
          const [r, g, b] = color.match(/[0-9.]+/g).map(Number).map(part => part / 255)
            .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
          return .2126 * r + .7152 * g + .0722 * b;
        };
        const behind = element => {
          const color = getComputedStyle(element).backgroundColor;
          return /, 0\\)$/.test(color) && element.parentElement ? behind(element.parentElement) : color;
        };
        return [...document.querySelectorAll('p, h1, h2, h3, td, th, label, button.primary, summary')].map(each => {
          const [a, b] = [light(getComputedStyle(each).color), light(behind(each))].sort((x, y) => y - x);
          return [(a + .05) / (b + .05), each.outerHTML.slice(0, 80)];
        }).filter(([contrast]) => contrast < 4.5);
        """
    )
    assert faint == [], "WCAG asks for a contrast of 4.5"


@pytest.fixture(scope="module")
def guarded_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts `vllm serve` with a list of plugins that names the page, with keys, behind a prefix."""
    named = {"VLLM_PLUGINS": "backplane,backplane_page", "BACKPLANE_DEVICE": "cpu"}
    with Server(
        tmp_path_factory.mktemp("guarded"),
        *(str(tiny_llama), "--served-model-name", "tiny", "--host", "127.0.0.1", *LIMITS),
        *("--api-key", *KEYS, "--root-path", PREFIX, "--disable-log-stats"),
        command=VLLM,
        variables=named,
    ) as running:
        yield running


def test_the_status_needs_a_key_and_the_page_of_the_server(guarded_server: Server) -> None:
    http = guarded_server.http
    for path in ("/backplane/status", f"{PREFIX}/backplane/status"):
        assert http.get(path).status_code == http.get(path, headers={"Authorization": "Bearer x"}).status_code == 401
        for key in KEYS:
            headers = {"Authorization": f"Bearer {key}"}
            assert http.get(path, headers=headers).status_code == 200
            assert http.get(path, headers={**headers, "Origin": "http://evil.example"}).status_code == 403
    answer = http.get("/backplane/status", headers={"Authorization": f"Bearer {KEYS[1]}"})
    assert "access-control-allow-origin" not in answer.headers
    assert not [key for key in KEYS if key in answer.text]
    assert str(Path.home()) not in json.dumps(answer.json()["facts"])
    assert http.head("/").status_code == http.get("/").status_code == http.get("/health").status_code == 200


def test_the_page_asks_for_the_key_and_works_below_a_prefix(guarded_server: Server, browser: Browser) -> None:
    browser.open(guarded_server.address + PREFIX + "/")
    browser.wait(lambda: browser.is_shown("#key-form"), "the form for the key")
    browser.type("#key", "wrong", key="enter")
    browser.wait(lambda: browser.text("#key-error"), "the refusal")
    assert browser.text("#key-error") == "The server does not accept this key."
    browser.type("#key", KEYS[1], key="enter")
    browser.wait(lambda: browser.text("#connection") == "connected", "the page is connected")
    assert browser.run("return document.getElementById('key').value") == ""
    assert (
        browser.run("return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])") == '[{},{},""]'
    )
    parameters(browser, max_tokens="5")
    ask(browser, "Hello")
    assert browser.text(".message.answer .figures").startswith("5 tokens")
    assert row(browser, "speed", "Metrics of vLLM") == "off (--disable-log-stats)"
    assert browser.text("#step-note") == "This server does not measure the parts of its steps."
    # The browser reports each of the two refused requests.
    assert [line for line in browser.errors() if "401" not in line] == []
