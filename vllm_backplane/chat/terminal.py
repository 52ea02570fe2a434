"""Reads messages of one or several lines from a terminal, with editing and a history."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from vllm_backplane.errors import BackplaneError

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'
MAX_HISTORY = 1000
"""Messages of earlier conversations that are kept."""


def history_file() -> Path:
    """Returns the file of the history, in the user's folder for the state of programs."""
    xdg = os.environ.get("XDG_STATE_HOME")
    # The XDG specification requires that a relative path is ignored.
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".local" / "state"
    return base / "vllm-backplane" / "chat-history"


class History:
    """Keeps messages in a file that only this user can read: one JSON text per line, as messages have several lines."""

    def __init__(self, path: Path) -> None:
        """Opens the file and creates it if needed. Raises BackplaneError if that fails."""
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.fchmod(descriptor, 0o600)
            self._file = os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")
            self._file.seek(0)
            lines = self._file.read().splitlines()
            if len(lines) > 2 * MAX_HISTORY:
                lines = lines[-MAX_HISTORY:]
                self._file.truncate(0)
                self._file.write("".join(f"{line}\n" for line in lines))
                self._file.flush()
        except OSError as fault:
            raise BackplaneError(
                f"the history cannot be kept in {path}: {fault.strerror}; set XDG_STATE_HOME to a folder of your own, "
                "or give --no-history"
            ) from fault
        self.messages = [message for line in lines[-MAX_HISTORY:] if (message := _message(line))]

    def add(self, message: str) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()


def _message(line: str) -> str:
    """Returns the message in a line of the file, or an empty text for a line that is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


class Terminal:
    """Reads messages from the terminal."""

    def __init__(self, history: History | None, completions: Sequence[str]) -> None:
        self._history = history
        self._has_skipped = False
        self._readline = _readline()
        if self._readline is not None:
            self._prepare(self._readline, completions)

    def _prepare(self, readline: ModuleType, completions: Sequence[str]) -> None:
        readline.set_auto_history(False)
        # Otherwise each line of a pasted text would be a message. Python switches it off for its own prompt.
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.parse_and_bind("tab: complete")
        readline.set_completer_delims(" \t\n")
        readline.set_completer(_completer(completions))
        for message in self._history.messages if self._history else ():
            self._remember(readline, message)

    def _remember(self, readline: ModuleType, message: str) -> None:
        """Adds a message to what the arrow keys find."""
        try:
            readline.add_history(message)
        except ValueError:  # readline encodes it in the encoding of the locale
            if not self._has_skipped:
                self._has_skipped = True
                _note("the arrow keys do not find messages that the locale cannot encode; set LC_ALL=C.UTF-8")

    def read(self) -> str:
        """Returns the next message. Raises EOFError at the end of the input and KeyboardInterrupt for Ctrl-C.

        A line that ends with a backslash continues in the next one, and so does everything between two `FENCE`.
        """
        message = self._read_lines()
        if message.strip():
            if self._readline is not None:
                self._remember(self._readline, message)
            if self._history is not None:
                self._add(self._history, message)
        return message

    def _add(self, history: History, message: str) -> None:
        try:
            history.add(message)
        except OSError as fault:
            self._history = None
            _note(f"messages are not kept any more: {history.path}: {fault.strerror}; free some space")

    def _read_lines(self) -> str:
        line = input(PROMPT)
        if line.startswith(FENCE):
            return self._read_block(line.removeprefix(FENCE))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(MORE))
        return "\n".join(lines)

    def _read_block(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(input(MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")


def _readline() -> ModuleType | None:
    """Returns Python's module for editing lines, or None where Python was built without it."""
    try:
        import readline
    except ImportError:
        _note("Python has no readline here: lines cannot be edited")
        return None
    return readline


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _completer(words: Sequence[str]) -> Callable[[str, int], str | None]:
    def complete(text: str, state: int) -> str | None:
        found = [word for word in words if text.startswith("/") and word.startswith(text)]
        return found[state] if state < len(found) else None

    return complete
