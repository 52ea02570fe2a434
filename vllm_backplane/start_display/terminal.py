"""Writes lines to a terminal, and rewrites the last one to show progress."""

from __future__ import annotations

import os
import re
import textwrap
import unicodedata
from collections.abc import Callable, Mapping

from vllm_backplane.safe_text import escaped

DEFAULT_COLUMNS = 80
NARROWEST = 20
"""Columns below which a text is no longer wrapped between words."""
ECHO = 4
"""Columns for what the terminal itself writes after the line that is rewritten: ^C for Ctrl-C."""
STYLES = {"bold": "1", "warning": "33", "error": "31"}


def columns_of(text: str) -> int:
    """Returns how many columns a text takes."""
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text
    )


def fitting(text: str, columns: int) -> str:
    """Returns as much of the text as fits into the columns, with an ellipsis if something is left out."""
    examined = text[: 4 * columns]  # a text of kilobytes may be a line of a log
    if examined == text and columns_of(text) <= columns:
        return text
    taken = 0
    for place, one in enumerate(examined):
        taken += columns_of(one)
        if taken >= columns:
            return f"{text[:place]}…"
    return f"{examined}…"


class Terminal:
    """Writes to one terminal. Texts are escaped; no escape sequence of another program reaches the terminal."""

    def __init__(
        self,
        write: Callable[[str], object],
        columns: Callable[[], int] = lambda: DEFAULT_COLUMNS,
        environment: Mapping[str, str] = os.environ,
        in_foreground: Callable[[], bool] = lambda: True,
    ) -> None:
        dumb = environment.get("TERM", "") in ("", "dumb")
        self._write = write
        self._columns = columns
        self._in_foreground = in_foreground
        self._rewrites = not dumb
        self._styled = not dumb and not environment.get("NO_COLOR")
        self._shown = 0  # columns of the line that will be rewritten
        self._text = ""

    @property
    def columns(self) -> int:
        return self._columns() or DEFAULT_COLUMNS

    def line(self, text: str = "", *, style: str = "", indent: int = 0, wrap: bool = True) -> None:
        """Writes a line, wrapped between words, with `indent` spaces before all but the first part."""
        text = escaped(text)
        columns = self.columns
        parts = [text]
        if wrap and columns >= NARROWEST and columns_of(text) > columns:
            margin = " " * (indent if indent <= columns // 2 else 2)
            parts = textwrap.wrap(
                text, columns, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False,
                drop_whitespace=True, replace_whitespace=False,
            )  # fmt: skip
        begin, end = (f"\x1b[{STYLES[style]}m", "\x1b[0m") if style and self._styled else ("", "")
        erased = self._erased()
        self._shown, self._text = 0, ""
        self._write(erased + begin + "\n".join(parts) + end + "\n")

    def progress(self, text: str) -> None:
        """Shows a text in the last line until the next text. A terminal that cannot rewrite a line shows nothing, and
        so does one that a shell uses meanwhile."""
        if not self._in_foreground():
            self._shown, self._text = 0, ""
            return
        text = fitting(escaped(text), self.columns - 1)  # in the last column, some terminals go on to the next line
        if self._rewrites and text != self._text:
            erased = self._erased()
            self._shown, self._text = columns_of(text), text
            self._write(erased + text)

    def clear(self) -> None:
        """Removes the text that shows progress."""
        if self._shown:
            self._write(self._erased())
            self._shown, self._text = 0, ""

    def _erased(self) -> str:
        return f"\r{' ' * min(self._shown + ECHO, self.columns - 1)}\r" if self._shown else ""


def plain_text(text: str) -> str:
    """Returns a text of a log without the escape sequences for colors."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)
