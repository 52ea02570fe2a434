"""Holds a conversation: its messages, its parameters, and the measured times of its answers."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_backplane.chat.client import Piece
from vllm_backplane.errors import BackplaneError, nearest, short_repr

PARAMETERS: dict[str, Callable[[str], int | float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
"""The parameters of a request that can be set, with the type of their values. The server checks the range."""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun in the singular or the plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(slots=True)
class Answer:
    """Holds an answer, its number of tokens and its times. An answer from a file has only its text."""

    text: str = ""
    reasoning: str = ""
    finish: str = ""
    """Why the answer ended: the server's reason, or "stopped" if the user stopped it."""
    prompt_tokens: int | None = None
    tokens: int | None = None
    first_seconds: float | None = None
    """Seconds from the request to the first token."""
    seconds: float = 0.0
    """Seconds from the request to the last token."""

    @property
    def rate(self) -> float | None:
        """Returns the tokens per second after the first one."""
        if not self.tokens or self.tokens < 2 or self.first_seconds is None or self.seconds <= self.first_seconds:
            return None
        return (self.tokens - 1) / (self.seconds - self.first_seconds)

    def receive(self, pieces: Iterable[Piece], show: Callable[[Piece], None]) -> None:
        """Collects the pieces of the answer, and shows each one. What has arrived stays if `pieces` raises."""
        began = time.perf_counter()
        for piece in pieces:
            now = time.perf_counter() - began
            if piece.text or piece.reasoning:
                self.first_seconds = now if self.first_seconds is None else self.first_seconds
                self.seconds = now
            self.text += piece.text
            self.reasoning += piece.reasoning
            self.finish = piece.finish or self.finish
            self.prompt_tokens = self.prompt_tokens if piece.prompt_tokens is None else piece.prompt_tokens
            self.tokens = self.tokens if piece.completion_tokens is None else piece.completion_tokens
            show(piece)

    def statistics(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "seconds_to_first_token": self.first_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.rate,
        }

    def described(self) -> str:
        """Returns the statistics as one line."""
        if self.first_seconds is None:
            return "no tokens"
        parts = [
            "unknown number of tokens" if self.tokens is None else counted(self.tokens, "token"),
            f"first token after {self.first_seconds:.2f} s",
        ]
        if self.rate is not None:
            parts.append(f"{self.rate:.1f} tokens/s after it")
        if self.prompt_tokens is not None:
            parts.append(f"prompt of {counted(self.prompt_tokens, 'token')}")
        return ", ".join(parts)


@dataclass(slots=True)
class Turn:
    """Holds a question and its answer."""

    question: str
    answer: Answer


@dataclass(slots=True)
class Conversation:
    """Holds the turns of a conversation, the system prompt and the parameters of its requests."""

    system: str = ""
    parameters: dict[str, int | float] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """Returns the messages of the conversation, in the form of the API, with a new question at the end."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.question})
            found.append({"role": "assistant", "content": turn.answer.text})
        if question is not None:
            found.append({"role": "user", "content": question})
        return found

    def set(self, assignment: str) -> None:
        """Sets a parameter by ``name=value``; ``name=`` removes it. Raises BackplaneError."""
        name, equals, value = assignment.partition("=")
        if name not in PARAMETERS:
            raise BackplaneError(
                f"unknown parameter {short_repr(name)}{nearest(name, PARAMETERS)} Parameters: {', '.join(PARAMETERS)}"
            )
        if not equals:
            raise BackplaneError(f"{name} has no value; write {name}=VALUE, or {name}= for the server's default")
        if not value:
            self.parameters.pop(name, None)
            return
        try:
            number = PARAMETERS[name](value)
            if not math.isfinite(number):
                raise ValueError
            self.parameters[name] = number
        except ValueError:
            kind = "an integer" if PARAMETERS[name] is int else "a number"
            raise BackplaneError(f"{name}={short_repr(value)} is not {kind}; write {name}=1, for example") from None

    def statistics_line(self) -> str:
        """Returns the statistics of all measured answers as one line."""
        measured = [turn.answer for turn in self.turns if turn.answer.first_seconds is not None]
        if not measured:
            return "no measured answers"
        first = statistics.median(answer.first_seconds or 0.0 for answer in measured)
        tokens = sum(answer.tokens or 0 for answer in measured)
        rated = [answer for answer in measured if answer.rate is not None]
        parts = [
            counted(len(measured), "answer"),
            counted(tokens, "token"),
            f"first token after {first:.2f} s (median)",
        ]
        if rated:
            seconds = sum(answer.seconds - (answer.first_seconds or 0.0) for answer in rated)
            parts.append(f"{sum((answer.tokens or 0) - 1 for answer in rated) / seconds:.1f} tokens/s after it")
        return ", ".join(parts)

    def save(self, path: Path, model: str, *, overwrite: bool = False) -> None:
        """Writes the conversation as JSON. Raises BackplaneError, also for a file that exists unless `overwrite`."""
        content = {"model": model, "parameters": self.parameters, "messages": self.messages()}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        # A half of a surrogate pair has no UTF-8, but JSON has a form for it.
        text = re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
        try:
            with path.open("w" if overwrite else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise BackplaneError(f"{path} exists; /save! {path} overwrites it") from None
        except OSError as fault:
            raise BackplaneError(f"cannot write {path}: {fault.strerror}; give another path") from fault

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Returns the conversation of a file that `save` wrote. Raises BackplaneError."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as fault:
            raise BackplaneError(f"cannot read {path}: {fault.strerror}; give another path") from fault
        except (ValueError, RecursionError) as fault:
            raise BackplaneError(f"{path} is not JSON; give a file that /save has written") from fault
        try:
            return cls._of(content)
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise BackplaneError(f"{path} holds no conversation; give a file that /save has written") from fault

    @classmethod
    def _of(cls, content: Any) -> Conversation:
        messages = [(message["role"], message["content"]) for message in content["messages"]]
        if not all(isinstance(text, str) for _, text in messages):
            raise ValueError("a message without text")
        loaded = cls()
        if messages and messages[0][0] == "system":
            loaded.system = messages.pop(0)[1]
        if [role for role, _ in messages] != ["user", "assistant"] * (len(messages) // 2):
            raise ValueError("questions and answers do not alternate")
        for (_, question), (_, answer) in zip(messages[::2], messages[1::2], strict=True):
            loaded.turns.append(Turn(question, Answer(answer)))
        for name, value in content["parameters"].items():
            loaded.set(f"{name}={value}")
        return loaded
