"""Makes texts of a model or a server harmless for a terminal, which would execute the escape sequences in them."""

from __future__ import annotations

import re
import unicodedata

_CONTROL = re.compile(
    # Control characters except tab and newline; those that reverse the direction of text; halves of surrogate pairs.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of characters that a terminal executes, or that change the order or the lines of a text."""
_FIRST_PICTURE = 0x2400
"""Unicode has a picture of each of the 32 first control characters, such as ␛ for escape."""


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_FIRST_PICTURE + code)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def safe(text: str) -> str:
    """Returns the text with control characters except tab and newline, marks of the direction of text, line separators
    and surrogates replaced by characters that show them."""
    return _CONTROL.sub(_shown, text)


def escaped(text: str) -> str:
    """Returns the text on one line, with the escapes of a Python string for all characters that cannot be seen.

    It is meant for names and log lines. A text of a model may need some of these characters, as within an emoji.
    """
    return "".join(
        one.encode("unicode_escape").decode() if unicodedata.category(one) in _INVISIBLE else one for one in text
    )


def one_line(text: str, length: int = 200) -> str:
    """Returns the text on one line, safe, and cut to a length."""
    shown = safe(" ".join(text.split()))
    return shown if len(shown) <= length else shown[: length - 1] + "…"
