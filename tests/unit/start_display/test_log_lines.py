"""Tests that warnings and errors are found in the log of a server, whatever has written them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_backplane.start_display.log_lines import LONGEST_TEXT, LogReader, Message

RECORDED = Path(__file__).parent / "recorded"


def read(*parts: str) -> list[Message]:
    reader = LogReader()
    return [message for part in parts for message in reader.feed(part)] + [*reader.finish()]


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("(APIServer pid=7) WARNING 11-19 08:06:30 [vllm.py:1802] Inductor is off", "WARNING", "Inductor is off"),
        ("ERROR 11-19 08:06:30 [core.py:1] no prefix", "ERROR", "no prefix"),
        ("prefix of a user (A pid=1) (B pid=2) WARNING 11-19 08:06:30 [a.py:1] nested", "WARNING", "nested"),
        ("\x1b[33mWARNING\x1b[0m 11-19 08:06:30 \x1b[90m[a.py:1]\x1b[0m colored", "WARNING", "colored"),
        ("WARNING:  Invalid HTTP request received.", "WARNING", "Invalid HTTP request received."),
        ("WARNING:root:nobody has configured this", "WARNING", "nobody has configured this"),
        ("ERROR:some.library:broken", "ERROR", "broken"),
        ("OMP: Warning #182: OMP_NUM_THREADS: ignored", "WARNING", "#182: OMP_NUM_THREADS: ignored"),
        ("OMP: Error #15: two libraries are loaded.", "ERROR", "#15: two libraries are loaded."),
        ("[W1119 08:06:30.123456789 socket.cpp:764] no IPv6", "WARNING", "no IPv6"),
        ("[E1119 08:06:30.123456789 socket.cpp:764] broken", "ERROR", "broken"),
        ("vllm-backplane: error: there is no model; name one", "ERROR", "there is no model; name one"),
        ("vllm serve: error: unrecognized arguments: --x", "ERROR", "unrecognized arguments: --x"),
        ('{"levelname": "ERROR", "message": "structured"}', "ERROR", "structured"),
    ],
)
def test_a_line_has_a_level_and_a_text(line: str, level: str, text: str) -> None:
    (found,) = read(line + "\n")
    assert (found.level, found.line) == (level, text)


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=7) INFO 11-19 08:06:30 [launcher.py:197] Route: /health, Methods: GET",
        'INFO:     127.0.0.1:35926 - "GET /health HTTP/1.1" 200 OK',
        "Loading tiny.gguf: 100%|####| 1M/1M",
        "OMP: Hint Unset it.",
        '  if hasattr(value, "__dict__"):',
        "[1, 2, 3]",
        '{"levelname": "INFO", "message": "structured"}',
        "{not JSON",
        "",
    ],
)
def test_other_lines_are_no_messages(line: str) -> None:
    assert read(line + "\n") == []


def test_a_warning_of_python_has_a_category() -> None:
    (found,) = read("/srv/vllm/dispatcher.py:138: FutureWarning: `a` is deprecated\n  if hasattr(value):\n")
    assert (found.category, found.text) == ("FutureWarning", "`a` is deprecated")


def test_records_of_several_processes_are_mixed() -> None:
    lines = [
        "(A pid=1) ERROR 11-19 08:06:43 [core.py:9] add_lora failed\r\n",
        "(B pid=2) ERROR 11-19 08:06:43 [other.py:9] alone\n",
        "(A pid=1) ERROR 11-19 08:06:43 [core.py:9] Traceback (most recent call last):\r\n",
        '(A pid=1) ERROR 11-19 08:06:43 [core.py:9]   File "a.py", line 1, in a\r\n',
        "(B pid=2) INFO 11-19 08:06:43 [other.py:9] nothing\n",
        "(A pid=1) ERROR 11-19 08:06:43 [core.py:9] vllm_backplane.errors.BackplaneError: correct it\n",
    ]
    assert [message.line for message in read(*lines)] == ["alone", "add_lora failed: correct it"]


def test_the_parts_of_a_log_may_end_anywhere() -> None:
    with (RECORDED / "engine_failed.log").open(newline="") as log:
        text = log.read()
    assert read(*text) == read(text)


def test_a_chained_traceback_is_its_last_error() -> None:
    text = (
        "Traceback (most recent call last):\n  File\nOSError: first\n\nThe above exception was the direct cause of the "
        "following exception:\n\nTraceback (most recent call last):\n  File\na.b.Error: second\nnext line\n"
    )
    assert [message.line for message in read(text)] == ["Error: second"]


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "SystemExit: 1", "asyncio.exceptions.CancelledError"])
def test_an_end_on_request_is_no_error(name: str) -> None:
    assert read(f"Traceback (most recent call last):\n  File\n{name}\n") == []


def test_an_ignored_exception_is_no_error() -> None:
    text = "Exception ignored in: <function f>\nTraceback (most recent call last):\n  File\nValueError: x\n"
    assert read(text) == []


def test_a_validation_error_is_reduced_to_its_reason() -> None:
    with (RECORDED / "option_refused.log").open(newline="") as log:
        errors = [message.line for message in read(log.read()) if message.level == "ERROR"]
    assert len(errors) == 1
    assert errors[0].startswith("unknown option 'devise'")
    assert "input_value" not in errors[0]


@pytest.mark.parametrize(
    "line",
    [
        "Loading safetensors checkpoint shards:  40% Completed | 2/5",
        "Multi-thread loading shards:  40% Completed | 2/5",
        "Loading tiny.gguf:  40%|####      | 1M/2M",
        "Fetching 5 files:  40%|####      | 2/5",
        "model-00001-of-00002.safetensors:  40%|####      | 1G/2G",
    ],
)
def test_progress_is_found(line: str) -> None:
    reader = LogReader()
    list(reader.feed(line))
    assert reader.percent == 40


@pytest.mark.parametrize("line", ["WARNING:  {}", '{{"levelname": "WARNING", "message": "{}"}}'])
def test_a_long_message_is_cut(line: str) -> None:
    (message,) = read(line.format("x" * 40_000) + "\n")
    assert len(message.line) <= LONGEST_TEXT


def test_an_endless_line_takes_little_memory() -> None:
    reader = LogReader()
    for _ in range(100):
        list(reader.feed("x" * (1 << 16)))
    assert len(reader._rest) <= 1 << 16
