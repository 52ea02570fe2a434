"""Tests what a terminal shows of the start of a server, with logs that real servers have written."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_backplane.safe_text import escaped
from vllm_backplane.start_display.addresses import address_lines, curl_lines
from vllm_backplane.start_display.display import HELD_SECONDS, MOST_WARNINGS, REPEAT_SECONDS, Display
from vllm_backplane.start_display.terminal import Terminal, columns_of, fitting

RECORDED = Path(__file__).parent / "recorded"
SERVED = {"host": "127.0.0.1", "port": 8000, "model": "tiny", "path": "/v1/chat/completions", "metrics": True}
STEPS: list[dict[str, Any]] = [
    {"step": "imports", "at": 8.4, "vllm": "0.33.0"},
    {
        "step": "model",
        "at": 9.6,
        "name": "tiny",
        "format": "GGUF",
        "bytes": 98362432,
        "dtype": "float32",
        "context": 8192,
        "device": "cpu",
        "reason": "the only device available",
    },
    {"step": "memory", "at": 11.0, "total": 24 << 30, "free": 19 << 30, "allowed": 9 << 30},
    {"step": "weights_begin", "at": 11.1, "bytes": 140 << 20},
    {"step": "weights", "at": 12.0},
    {"step": "kv_cache", "at": 12.9, "bytes": 8 << 30},
    {"step": "warm_up", "at": 13.3},
    {"step": "ready", "at": 14.2, "kv_cache_tokens": 204480, **SERVED},
]


class Screen:
    """Runs a display on a terminal that keeps what is written."""

    def __init__(self, columns: int = 100, **environment: str) -> None:
        self.raw = ""
        self.now = 0.0
        terminal = Terminal(self._write, lambda: columns, {"TERM": "xterm", **environment})
        self.display = Display(terminal, "/srv/serve.log", 0.0, clock=lambda: self.now, time_of_day=lambda: "12:00:00")

    def _write(self, text: str) -> None:
        self.raw += text

    @property
    def lines(self) -> list[str]:
        """Returns the lines as a terminal shows them: a carriage return goes back to the beginning of a line."""
        shown = []
        for line in self.raw.split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            shown.append("".join(cells).rstrip())
        return shown

    def start(self, *steps: dict[str, Any]) -> Screen:
        self.display.begin("vllm-backplane")
        for step in steps or STEPS:
            self.display.step(step)
        return self

    def read(self, name: str) -> Screen:
        with (RECORDED / name).open(newline="") as log:
            self.display.log(log.read())
        return self

    def end(self, **facts: Any) -> list[str]:
        """Ends the server, and returns the lines that this adds."""
        before = len(self.lines)
        self.display.step({"step": "end", **facts})
        self.display.end()
        return [line for line in self.lines[before - 1 :] if line]


def test_a_start_shows_its_phases_in_order_and_how_to_use_the_server() -> None:
    screen = Screen(NO_COLOR="1").start()
    labels = [line.split()[0] for line in screen.lines if line.startswith("  ") and " s" in line[:22]]
    assert labels == ["imports", "model", "engine", "weights", "KV", "warm-up", "server"]
    text = "\n".join(screen.lines)
    for expected in (
        "log        /srv/serve.log",
        "imports      8.4 s  vLLM 0.33.0",
        "model        1.2 s  tiny: GGUF, 94 MiB, computes in float32, 8,192 tokens of context",
        "device              cpu: the only device available",
        "19.00 GiB free; weights and KV cache may take 9.00 GiB",
        "weights      1.0 s  140 MiB in memory",
        "KV cache     0.9 s  8.00 GiB",
        "Ready after 14.2 s",
        "API      http://127.0.0.1:8000/v1",
        "metrics  http://127.0.0.1:8000/metrics",
        "204,480 tokens in the KV cache",
        "Ctrl-C",
    ):
        assert expected in text
    assert "page" not in text, "no page is served"
    assert len(screen.lines) <= 25
    assert "\x1b" not in screen.raw


def test_the_log_of_a_start_adds_only_the_warnings_that_concern_the_user() -> None:
    screen = Screen(columns=500, NO_COLOR="1").start(*STEPS[:-1])
    before = len(screen.lines)
    screen.read("ready.log")
    added = [line.strip() for line in screen.lines[before - 1 :] if line]
    assert [line.split(":")[0] for line in added] == ["warning"] * 2
    assert "LoRA dynamic loading" in added[0]
    assert "Development endpoints" in added[1]


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("engine_failed.log", "OSError: driver 4.2 does not answer on slot 7"),
        ("option_refused.log", "unknown option 'devise' in the 'backplane' section of --additional-config; did you"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_failed_start_shows_the_error_that_caused_it_and_the_log(log: str, error: str, late: bool) -> None:
    screen = Screen(columns=1000).start(*STEPS[:1]).read(log)
    if late:  # the server took long to end after its engine failed
        screen.now = HELD_SECONDS + 1
        screen.display.tick()
    first, last = screen.end()
    assert f"Error: {error}" in first
    assert last == "The log of the server is /srv/serve.log"
    assert "Traceback" not in screen.raw


def test_what_the_command_states_is_the_error() -> None:
    screen = Screen(NO_COLOR="1").start(*STEPS[:1])
    screen.display.log(
        "Traceback (most recent call last):\n  File\nValueError: caught\n\nvllm-backplane: error: say x\n"
    )
    assert screen.end(status=2)[0] == "Error: say x"


def test_the_reason_that_ends_a_server_is_shown_if_the_log_has_none() -> None:
    assert Screen(NO_COLOR="1").start().end(status=1, reason="its engine died")[0] == "Error: its engine died"


def test_a_killed_server_shows_the_end_of_its_log() -> None:
    screen = Screen(NO_COLOR="1").start()
    screen.display.log("one\ntwo\n\nthree\nfour\n")
    screen.display.end()
    assert [line.strip() for line in screen.lines[-6:-1]] == [
        "Error: the server was killed, or ended without a message; its log ends with:",
        "two",
        "three",
        "four",
        "The log of the server is /srv/serve.log",
    ]


@pytest.mark.parametrize("status", [130, 143, None])
def test_a_server_that_is_stopped_shows_no_errors(status: int | None) -> None:
    screen = Screen(NO_COLOR="1").start(*STEPS[:3])
    screen.display.step({"step": "stopping"})
    screen.read("engine_failed.log")
    assert screen.end(status=status) == ["Stopped."]
    assert "Stopping…" in screen.lines
    assert "rror" not in screen.raw


def test_errors_while_serving_are_one_line_each_and_repeated_ones_are_shown_once() -> None:
    screen = Screen(columns=500, NO_COLOR="1").start()
    before = len(screen.lines)
    for moment in (0.0, 1.0, REPEAT_SECONDS + 1.0):
        screen.now = moment
        screen.read("engine_failed.log")
        screen.now += HELD_SECONDS
        screen.display.tick()
    added = [line for line in screen.lines[before - 1 :] if line.startswith("12:00:00 error: ")]
    first = "12:00:00 error: EngineCore failed to start: OSError: driver 4.2 does not answer on slot 7"
    assert added.count(first) == 2


def test_a_start_shows_a_few_warnings() -> None:
    screen = Screen(NO_COLOR="1").start(*STEPS[:3])
    for number in range(50):
        screen.display.log(f"(EngineCore pid=7) WARNING 11-19 08:06:30 [utils.py:333] weight {number}\n")
    shown = [line for line in screen.lines if "weight" in line and "warning" in line]
    assert len(shown) == MOST_WARNINGS
    assert "  More warnings are in the log." in screen.lines


def test_progress_is_one_line_that_is_rewritten() -> None:
    screen = Screen(NO_COLOR="1").start(*STEPS[:4])
    before = len(screen.lines)
    for percent in (3, 40, 100):
        screen.display.log(f"\rLoading tiny.gguf: {percent:3}%|#   | 1M/2M [00:00<00:01]")
        screen.display.tick()
        assert f"{percent} %" in screen.lines[-1]
    assert len(screen.lines) == before
    screen.display.step(STEPS[4])
    assert screen.lines[-2].endswith("140 MiB in memory"), "nothing of the progress is left in the line"


def test_a_dumb_terminal_gets_whole_lines() -> None:
    screen = Screen(TERM="dumb").start()
    assert "\r" not in screen.raw
    assert "\x1b" not in screen.raw
    assert any("Ready after" in line for line in screen.lines)


@pytest.mark.parametrize("columns", [5, 30, 60])
def test_progress_fits_into_a_narrow_terminal(columns: int) -> None:
    screen = Screen(columns, NO_COLOR="1").start()
    for part in screen.raw.replace("\n", "\r").split("\r"):
        if "…" in part and "  " in part:
            assert columns_of(part) < columns


def test_texts_of_others_cannot_control_the_terminal() -> None:
    hostile = "a\x1b]0;title\x07\x1b[31m\x9b2J\u202eb'c\nd"
    model = {**STEPS[1], "name": hostile, "reason": hostile}
    ready = {**STEPS[-1], "model": hostile}
    screen = Screen(columns=1000, NO_COLOR="1").start(STEPS[0], model, *STEPS[2:-1], ready)
    screen.display.log(f"(EngineCore pid=7) WARNING 11-19 08:06:30 [x.py:1] {hostile}\n")
    assert not {one for one in screen.raw if one < " " or "\x7f" <= one < "\xa0" or one == "\u202e"} - {"\n", "\r"}
    curl = "\n".join(line for line in screen.lines if line.startswith(("curl", "  -d"))).replace("\\\n", "")
    assert json.loads(shlex.split(curl)[-1])["model"] == hostile


def test_another_worker_reports_the_same_step() -> None:
    screen = Screen().start()
    before = screen.raw
    screen.display.step(STEPS[4])
    screen.display.step(STEPS[-1])
    assert screen.raw == before


def test_the_terminal_is_given_back() -> None:
    screen = Screen(NO_COLOR="1").start(*STEPS[:1])
    screen.display.step({"step": "release", "reason": "With --headless, the log of vLLM is shown:"})
    screen.display.end()
    assert screen.lines[-2:] == ["With --headless, the log of vLLM is shown:", ""]


@pytest.mark.parametrize(
    ("facts", "address"),
    [
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8000/v1"),
        ({"host": ""}, "http://127.0.0.1:8000/v1"),
        ({"host": "::"}, "http://[::1]:8000/v1"),
        ({"host": "fe80::1"}, "http://[fe80::1]:8000/v1"),
        ({"host": "server.example"}, "http://server.example:8000/v1"),
        ({"tls": True}, "https://127.0.0.1:8000/v1"),
        ({"root_path": "/llm/"}, "http://127.0.0.1:8000/llm/v1"),
        ({"uds": "/run/s"}, "http://localhost/v1"),
    ],
)
def test_addresses_can_be_reached(facts: dict[str, Any], address: str) -> None:
    given = {**SERVED, **facts}
    assert address_lines(given)[0] == ("API", address)
    words = shlex.split("\n".join(curl_lines(given)).replace("\\\n", ""))
    assert f"{address}/chat/completions" in words
    is_open = any("other hosts" in text for _name, text in address_lines(given))
    assert is_open == (facts.get("host") in ("0.0.0.0", "", "::"))


def test_the_page_is_shown_if_there_is_one() -> None:
    assert ("page", "http://127.0.0.1:8000/") in address_lines({**SERVED, "page": True})


def test_the_command_has_what_the_server_asks_for() -> None:
    command = " ".join(curl_lines({**SERVED, "key": "$VLLM_API_KEY", "tls": True}))
    assert '-H "Authorization: Bearer $VLLM_API_KEY"' in command
    assert command.startswith("curl --insecure https://")
    assert "--unix-socket '/run/a b'" in curl_lines({**SERVED, "uds": "/run/a b"})[0]
    assert curl_lines({**SERVED, "path": "/v1/embeddings"})[1].count('"input"') == 1
    assert curl_lines({**SERVED, "path": None}) == ["curl http://127.0.0.1:8000/v1/models"]


def test_a_key_is_to_be_filled_in() -> None:
    text = "\n".join(Screen().start(*STEPS[:-1], {**STEPS[-1], "key": "YOUR_API_KEY"}).lines)
    assert "Replace YOUR_API_KEY" in text


def test_letters_of_all_languages_are_not_escaped() -> None:
    assert escaped("Größe 模型 é 🙂") == "Größe 模型 é 🙂"
    assert columns_of("模型e\u0301") == 5


@pytest.mark.parametrize("text", ["word " * 8000, "模" * 40_000, "e\u0301" * 20_000, "\u0301" * 40_000])
def test_a_text_of_kilobytes_is_cut_at_once(text: str) -> None:
    began = time.monotonic()
    cut = fitting(text, 40)
    assert time.monotonic() - began < 1.0
    assert columns_of(cut) <= 40
    assert cut.endswith("…")


def test_a_text_that_fits_is_not_cut() -> None:
    assert fitting("12345", 5) == "12345"
    assert fitting("123456", 5) == "1234…"
    assert fitting("模型模", 5) == "模型…"
    assert fitting("", 0) == ""


def test_progress_is_not_shown_on_a_terminal_that_a_shell_uses() -> None:
    foreground, written = True, []
    terminal = Terminal(written.append, environment={"TERM": "xterm"}, in_foreground=lambda: foreground)
    terminal.progress("one")
    foreground = False
    terminal.progress("two")
    terminal.line("three")
    assert written == ["one", "three\n"], "nothing of the line of the shell is erased"
    foreground = True
    terminal.progress("two")
    assert written[-1] == "two"


def test_the_environment_decides_about_styles() -> None:
    assert "\x1b[1m" in Screen().start().raw
