"""Tests files of conversations, the history, and texts that a terminal would execute."""

from __future__ import annotations

import errno
import json
from types import SimpleNamespace

import pytest

from vllm_backplane.chat import terminal
from vllm_backplane.chat.client import Piece
from vllm_backplane.chat.conversation import Answer, Conversation, Turn
from vllm_backplane.chat.terminal import History, Terminal
from vllm_backplane.errors import BackplaneError
from vllm_backplane.safe_text import one_line, safe

GOOD = {"model": "m", "parameters": {"top_k": 3}, "messages": []}


def test_a_saved_conversation_is_loaded_again(tmp_path):
    given = Conversation("système", {"temperature": 0.5}, [Turn("a\nb", Answer("\ud800 \x1b"))])
    given.save(tmp_path / "talk.json", "m")
    loaded = Conversation.load(tmp_path / "talk.json")
    assert loaded.messages("next") == given.messages("next")
    assert loaded.parameters == given.parameters
    assert loaded.statistics_line() == "no measured answers"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "holds no conversation"),
        (json.dumps(GOOD | {"messages": [{"role": "user", "content": "?"}]}).encode(), "holds no conversation"),
        (json.dumps(GOOD | {"messages": [{"role": "system", "content": [1]}]}).encode(), "holds no conversation"),
        (json.dumps(GOOD | {"parameters": {"top_k": [1]}}).encode(), "is not an integer"),
        (json.dumps(GOOD | {"parameters": {"tools": 1}}).encode(), "unknown parameter 'tools'"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(tmp_path, content, message):
    (tmp_path / "talk.json").write_bytes(content)
    with pytest.raises(BackplaneError, match=message):
        Conversation.load(tmp_path / "talk.json")


def test_a_conversation_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(BackplaneError, match="cannot write"):
        Conversation().save(tmp_path / "no folder" / "talk.json", "m")


def test_the_rate_counts_the_tokens_after_the_first():
    answer = Answer(tokens=11, first_seconds=0.5, seconds=1.5, prompt_tokens=3)
    assert answer.rate == pytest.approx(10)
    assert answer.described() == "11 tokens, first token after 0.50 s, 10.0 tokens/s after it, prompt of 3 tokens"
    conversation = Conversation(turns=[Turn("?", answer), Turn("?", Answer("from a file"))])
    line = "1 answer, 11 tokens, first token after 0.50 s (median), 10.0 tokens/s after it"
    assert conversation.statistics_line() == line
    assert Answer("x", first_seconds=0.1, seconds=0.2).described().startswith("unknown number of tokens")
    assert Answer().described() == "no tokens"


def test_what_has_arrived_of_an_answer_stays_when_the_rest_fails():
    def pieces():
        yield Piece(reasoning="hm")
        yield Piece("half", completion_tokens=1)
        raise BackplaneError("lost")

    answer = Answer()
    with pytest.raises(BackplaneError):
        answer.receive(pieces(), lambda piece: None)
    assert (answer.text, answer.reasoning, answer.tokens) == ("half", "hm", 1)


def test_control_characters_are_shown():
    assert safe("a\tb\nc é 👍") == "a\tb\nc é 👍"
    assert safe("\x1b]0;title\x07\r\x00\x7f\x85\u202e\u2066\udc80") == "␛]0;title␇␍␀\\x7f\\x85\\u202e\\u2066\\udc80"
    assert one_line("a\n b\x1b" + "c" * 300, 10) == "a b␛ccccc…"


def test_the_history_is_shortened_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(terminal, "MAX_HISTORY", 3)
    file = tmp_path / "state" / "history"
    history = History(file)
    for number in range(8):
        history.add(f"message\n{number}")
    with file.open("ab") as damaged:
        damaged.write(b'"cut\n[1]\n\xff\n')
    assert History(file).messages == []  # the last three lines are damaged, and older ones are gone
    History(file).add("again")
    assert History(file).messages == ["again"]


def test_messages_that_the_locale_cannot_encode_are_skipped(tmp_path, monkeypatch, capsys):
    history = History(tmp_path / "history")
    for message in ("é", "plain", "ü"):
        history.add(message)
    found: list[str] = []

    def nothing(*_arguments):
        pass

    names = ("set_auto_history", "parse_and_bind", "set_completer_delims", "set_completer")
    readline = SimpleNamespace(
        **dict.fromkeys(names, nothing), add_history=lambda text: found.append(text.encode("ascii").decode())
    )
    monkeypatch.setattr(terminal, "_readline", lambda: readline)
    talk = Terminal(History(tmp_path / "history"), [])
    monkeypatch.setattr("builtins.input", lambda _prompt: "ö")
    assert talk.read() == "ö"
    assert found == ["plain"]
    assert capsys.readouterr().err.count("\n") == 1
    assert History(tmp_path / "history").messages[-1] == "ö"


def test_a_full_disk_does_not_end_the_conversation(tmp_path, monkeypatch, capsys):
    def full(_message):
        raise OSError(errno.ENOSPC, "No space left on device")

    history = History(tmp_path / "history")
    monkeypatch.setattr(history, "add", full)
    monkeypatch.setattr(terminal, "_readline", lambda: None)
    monkeypatch.setattr("builtins.input", lambda _prompt: "hi")
    talk = Terminal(history, [])
    assert [talk.read(), talk.read()] == ["hi", "hi"]
    assert capsys.readouterr().err.count("No space left on device; free some space\n") == 1


def test_a_history_that_cannot_be_kept_is_an_error(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(BackplaneError, match="--no-history"):
        History(tmp_path / "state" / "history")
