"""Runs a conversation in a terminal: reads messages and commands, and prints answers while they arrive."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from vllm_backplane.chat.client import Client, Piece, ServedModel, ServerError
from vllm_backplane.chat.conversation import Answer, Conversation, Turn, counted
from vllm_backplane.chat.private_server import PrivateServer
from vllm_backplane.chat.terminal import Terminal
from vllm_backplane.errors import BackplaneError, nearest
from vllm_backplane.safe_text import safe

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
COMMANDS = {
    "/help": "list the commands",
    "/system TEXT": "set the system prompt; without TEXT: show it; '/system -' removes it",
    "/set NAME=VALUE …": "set parameters of the requests, such as temperature=0.2 max_tokens=100; without: show them",
    "/save FILE": "write the conversation as JSON; '/save! FILE' overwrites a file",
    "/load FILE": "continue a conversation that /save wrote",
    "/stats": "show tokens, tokens/s and time to first token of the last answer and of the conversation",
    "/undo": "remove the last question and its answer",
    "/retry": "ask the last question again",
    "/clear": "begin a new conversation; the system prompt stays",
    "/exit": "end (also Ctrl-D, or Ctrl-C twice)",
}
HELP = """\
A line that ends with \\ continues in the next one. A message between two \"\"\" may have any lines, and a pasted text
is one message. A message that begins with / is written with //. Ctrl-C stops an answer; what has arrived is kept.
"""
NAMES = [usage.split()[0] for usage in COMMANDS]


class Session:
    """Holds one conversation in a terminal with one model."""

    def __init__(
        self,
        client: Client,
        model: ServedModel,
        conversation: Conversation,
        terminal: Terminal,
        server: PrivateServer | None,
    ) -> None:
        self.client, self.model, self.conversation = client, model, conversation
        self.terminal = terminal
        self.server = server
        self._last_question: str | None = None
        self._reasons = False

    def run(self) -> int:
        """Reads and answers messages until the user ends the conversation; returns the exit status."""
        place = "" if self.server else f" at {safe(self.client.endpoint.shown)}"
        print(f"{safe(self.model.name)}{place}; /help lists the commands, Ctrl-D ends")
        interrupted = False
        while True:
            try:
                message = self.terminal.read()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    print()
                    return INTERRUPTED
                interrupted = True
                print("\n(Ctrl-C again ends the conversation)")
                continue
            interrupted = False
            try:
                if message.strip() == "/exit":
                    return 0
                self.handle(message)
            except BackplaneError as fault:
                _report(str(fault))
            except KeyboardInterrupt:  # between an answer and the next prompt
                print()

    def handle(self, message: str) -> None:
        """Handles a message or a command. Raises BackplaneError."""
        if not message.strip():
            return
        if not message.startswith("/") or message.startswith("//"):
            self._ask(message.removeprefix("/"))
            return
        name, _, argument = message.strip().partition(" ")
        actions: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/set": self._set,
            "/save": self._save,
            "/save!": self._save_over,
            "/load": self._load,
            "/stats": self._stats,
            "/undo": self._undo,
            "/retry": self._retry,
            "/clear": self._clear,
        }
        if name not in actions:
            raise BackplaneError(
                f"unknown command {safe(name)!r}{nearest(name, NAMES)} /help lists the commands, and a message that "
                "begins with / is written with //"
            )
        actions[name](argument.strip())

    # --- questions ----------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        self._last_question = question
        answer, self._reasons = Answer(), False
        messages = self.conversation.messages(question)
        pieces = self.client.stream(self.model, messages, self.conversation.parameters)
        try:
            with closing(pieces):
                answer.receive(pieces, self._show)
        except KeyboardInterrupt:
            answer.finish = "stopped"
        except ServerError as fault:
            self._end_line(answer)
            explained = self.server.explained(fault) if self.server else fault
            raise BackplaneError(f"{explained} (the conversation is unchanged: /retry, /save)") from fault
        self._end_line(answer)
        if answer.finish == "stopped":
            print("(stopped)")
        if answer.finish == "length":
            print("(the answer ended at max_tokens or at the end of the context)")
        if answer.text:
            self.conversation.turns.append(Turn(question, answer))

    def _show(self, piece: Piece) -> None:
        if piece.reasoning:
            self._reasons = True
            _print(f"{DIM}{safe(piece.reasoning)}{PLAIN}")
        if piece.text:
            if self._reasons:
                self._reasons = False
                _print("\n\n")
            _print(safe(piece.text))

    def _end_line(self, answer: Answer) -> None:
        shown = answer.text or answer.reasoning
        if shown and not shown.endswith("\n"):
            print()

    # --- commands -----------------------------------------------------------------------------------------------------

    def _help(self, _argument: str) -> None:
        width = max(map(len, COMMANDS))
        for usage, text in COMMANDS.items():
            print(f"{usage.ljust(width)}  {text}")
        print(HELP, end="")

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.system = "" if argument == "-" else argument
        print(f"system prompt: {safe(self.conversation.system) or '(none)'}")

    def _set(self, argument: str) -> None:
        for assignment in argument.split():
            self.conversation.set(assignment)
        shown = " ".join(f"{name}={value}" for name, value in self.conversation.parameters.items())
        print(f"parameters: {shown or '(the defaults of the server)'}")

    def _save(self, argument: str, *, overwrite: bool = False) -> None:
        path = _path(argument)
        self.conversation.save(path, self.model.name, overwrite=overwrite)
        print(f"saved {counted(len(self.conversation.turns), 'answer')} to {path}")

    def _save_over(self, argument: str) -> None:
        self._save(argument, overwrite=True)

    def _load(self, argument: str) -> None:
        self.conversation = Conversation.load(_path(argument))
        self._last_question = None
        print(f"loaded {counted(len(self.conversation.turns), 'answer')}")

    def _stats(self, _argument: str) -> None:
        last = self.conversation.turns[-1].answer.described() if self.conversation.turns else "none"
        print(f"last answer:  {last}")
        print(f"conversation: {self.conversation.statistics_line()}")

    def _undo(self, _argument: str) -> None:
        if not self.conversation.turns:
            raise BackplaneError("there is nothing to undo; ask a question first")
        turn = self.conversation.turns.pop()
        print(f"removed the last question; {counted(len(self.conversation.turns), 'answer')} left")
        self._last_question = turn.question

    def _retry(self, _argument: str) -> None:
        turns = self.conversation.turns
        question = self._last_question or (turns[-1].question if turns else None)
        if question is None:
            raise BackplaneError("there is no question to ask again; ask one first")
        replaced = turns.pop() if turns and turns[-1].question == question else None
        before = len(turns)
        try:
            self._ask(question)
        finally:
            if replaced is not None and len(turns) == before:
                turns.append(replaced)  # no new answer came

    def _clear(self, _argument: str) -> None:
        self.conversation.turns.clear()
        self._last_question = None
        print("a new conversation")


def _path(argument: str) -> Path:
    if not argument:
        raise BackplaneError("no file is named; write /save FILE or /load FILE")
    try:
        return Path(argument).expanduser()
    except RuntimeError as fault:
        raise BackplaneError(f"{argument} names an unknown user; give another path") from fault


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _report(message: str) -> None:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
