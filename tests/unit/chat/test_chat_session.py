"""Tests conversations in a pseudo terminal, with a stand-in server."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import chat_stand_in
import pytest
from chat_stand_in import DONE, StandIn, endless, event, refuse, stream

from tests.environment import AT_START
from tests.pseudo_terminal import CTRL_C, CTRL_D, PseudoTerminal

COMMAND = str(Path(sys.executable).parent / "vllm-backplane")
PROMPT = ">>> "
UP = "\x1b[A"

pytestmark = pytest.mark.process


class Talk(PseudoTerminal):
    """Runs a conversation with a stand-in server."""

    def __init__(self, address: str, folder: Path, *arguments: str) -> None:
        variables = {**AT_START, "XDG_STATE_HOME": str(folder / "state"), "NO_COLOR": "1"}
        super().__init__([COMMAND, "chat", "--url", address, *arguments], variables, folder)
        self.expect(PROMPT)

    def say(self, text: str) -> str:
        """Types a message, and returns what is printed before the next prompt."""
        self.type(f"{text}\n")
        return self.expect(PROMPT)


@pytest.fixture
def server() -> Iterator[tuple[StandIn, str]]:
    with chat_stand_in.running() as (stand_in, address):
        yield stand_in, address


def answering(*texts: str):
    """Returns an answer of several pieces, the last of which has the number of tokens."""
    events = [event(text, tokens=number) for number, text in enumerate(texts, 1)]
    return lambda handler: stream(handler, *events, event(finish="stop"), DONE)


def test_a_conversation(server, tmp_path):
    stand_in, address = server
    with Talk(address, tmp_path, "--system", "be kind") as talk:
        stand_in.answer = answering("red \x1b[31m", "and\u202e \x9b", "\ud800done")
        assert "red ␛[31mand\\u202e \\x9b\\ud800done\n" in talk.say("hi")
        stand_in.answer = answering("two")
        talk.say("a\\\nb")
        talk.say('"""c\n\nd"""')
        talk.say("\x1b[200~e\nf\x1b[201~")
        talk.say("//g")
        questions = [message["content"] for message in stand_in.requests[-1]["messages"] if message["role"] == "user"]
        assert questions == ["hi", "a\nb", "c\n\nd", "e\nf", "/g"]
        assert stand_in.requests[-1]["messages"][0] == {"role": "system", "content": "be kind"}

        stats = talk.say("/stats")
        assert "last answer:  1 token, first token after " in stats
        assert "conversation: 5 answers, 7 tokens, first token after " in stats
        assert "tokens/s after it" in stats

        assert "temperature=0.5 max_tokens=9" in talk.say("/set temperature=0.5 max_tokens=9")
        assert "error: unknown parameter 'tmp'" in talk.say("/set tmp=1")
        assert "parameters: max_tokens=9" in talk.say("/set temperature=")
        assert "system prompt: be brief" in talk.say("/system be brief")
        assert "did you mean '/undo'?" in talk.say("/undoo")
        assert "'/save! FILE' overwrites" in talk.say("/help")

        assert "4 answers left" in talk.say("/undo")
        assert "saved 4 answers" in talk.say("/save talk.json")
        assert "exists; /save! talk.json overwrites it" in talk.say("/save talk.json")
        assert "saved 4 answers" in talk.say("/save! talk.json")
        saved = json.loads((tmp_path / "talk.json").read_text())
        assert (saved["model"], saved["parameters"], len(saved["messages"])) == ("first", {"max_tokens": 9}, 9)
        assert saved["messages"][0] == {"role": "system", "content": "be brief"}

        assert "a new conversation" in talk.say("/clear")
        assert "nothing to undo" in talk.say("/undo")
        assert "no question to ask again" in talk.say("/retry")
        assert "cannot read none.json" in talk.say("/load none.json")
        assert "loaded 4 answers" in talk.say("/load talk.json")
        talk.say("after")
        assert stand_in.requests[-1]["messages"] == [*saved["messages"], {"role": "user", "content": "after"}]
        assert stand_in.requests[-1]["max_tokens"] == 9
        talk.type("/exit\n")
        assert talk.wait() == 0


def test_an_answer_is_stopped_and_the_conversation_goes_on(server, tmp_path):
    stand_in, address = server
    with Talk(address, tmp_path) as talk:
        stand_in.answer = endless
        talk.type("go\n")
        talk.expect("word word")
        talk.type(CTRL_C)
        talk.expect("(stopped)")
        talk.expect(PROMPT)
        assert stand_in.disconnected.wait(30)
        stand_in.answer = answering("fine")
        talk.say("and now?")
        _, kept, asked = stand_in.requests[-1]["messages"]
        assert kept["content"].startswith("word word")
        assert asked["content"] == "and now?"
        stand_in.answer = refuse(500, b"broken")
        assert "error: the server failed (500): broken" in talk.say("lost?")
        stand_in.answer = lambda handler: stream(handler, event("par"))
        assert "ended in the middle of the answer" in talk.say("/retry")
        stand_in.answer = answering("found")
        assert "found" in talk.say("/retry")
        contents = [message["content"] for message in stand_in.requests[-1]["messages"]]
        assert contents[2:] == ["and now?", "fine", "lost?"]
        # A failed second attempt leaves the answer of the first one.
        stand_in.answer = refuse(500, b"broken")
        talk.say("/retry")
        stand_in.answer = answering("more")
        talk.say("last")
        assert [message["content"] for message in stand_in.requests[-1]["messages"]][4:] == ["lost?", "found", "last"]
        talk.type(CTRL_C)
        talk.expect("(Ctrl-C again ends the conversation)")
        talk.expect(PROMPT)
        talk.type(CTRL_C)
        assert talk.wait() == 130


def test_the_history_is_private_and_outlives_the_conversation(server, tmp_path):
    stand_in, address = server
    with Talk(address, tmp_path) as talk:
        talk.say("one\\\ntwo")
        talk.type(CTRL_D)
        assert talk.wait() == 0
    file = tmp_path / "state/vllm-backplane/chat-history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with Talk(address, tmp_path) as talk:
        talk.say(UP)
        assert stand_in.requests[-1]["messages"][-1]["content"] == "one\ntwo"
        os.kill(talk.process.pid, signal.SIGTERM)
        assert talk.wait() == 143
    before = file.read_text()
    with Talk(address, tmp_path, "--no-history") as talk:
        talk.say("secret")
        talk.type(CTRL_C)
        talk.expect("(Ctrl-C again")
        talk.expect(PROMPT)
        talk.type(CTRL_D)
        assert talk.wait() == 0
    assert file.read_text() == before
