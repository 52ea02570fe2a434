"""Finds warnings and errors in the log of a server.

A record of vLLM may have several lines, of which all but the last end with a carriage return, and the lines of several
processes are mixed. A traceback is reduced to its last line, which has the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_backplane.start_display.terminal import plain_text

MOST_CHARACTERS = 1 << 16
"""Characters of a line that are kept while its end is missing."""
LONGEST_TEXT = 4000
"""Characters of a line that are examined and shown."""
LEVELS = ("WARNING", "ERROR", "CRITICAL")

_PROCESS = re.compile(r"\((?P<process>[^()]* pid=\d+)\) ")
_RECORD = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*:\d+\] ?(?P<text>.*)"
)
_PYTHON_WARNING = re.compile(r"\S.*?:\d+: (?P<category>\w*Warning): (?P<text>.*)")
_UVICORN = re.compile(r"(?P<level>WARNING|ERROR|CRITICAL): {1,6}(?P<text>\S.*)")
_ROOT = re.compile(r"(?P<level>WARNING|ERROR|CRITICAL):[^\s:]+:(?P<text>.*)")
"""A record of a library whose logger nobody has configured."""
_OPENMP = re.compile(r"OMP: (?P<level>Warning|Error) (?P<text>#\d+: .*)")
_NATIVE = re.compile(r"\[(?P<level>[WE])\d{4} [^\]]*\] (?:Warning: )?(?P<text>.*)")
_COMMAND = re.compile(r"(?P<program>[\w][\w .-]*): error: (?P<text>.*)")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z_]\w*(?:: .*)?")
_OWN = re.compile(r"vllm_(?:backplane|patchbay)\.[\w.]+: (?P<text>.*)")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_TRACEBACK = "Traceback (most recent call last):"
_IGNORED = "Exception ignored in"
_VALIDATION = re.compile(r"\d+ validation errors? for \w+")
_OF_ENDS = ("KeyboardInterrupt", "SystemExit", "CancelledError")
"""Exceptions with which a process ends on request."""
_PERCENT = re.compile(
    r"(?:(?:[Ll]oading|Fetching|Downloading) .{0,200}?|\.(?:safetensors|gguf|bin|pt)): +(?P<percent>\d{1,3})%"
)


@dataclass(frozen=True, slots=True)
class Message:
    """Holds a warning or an error of the log, in one line each."""

    level: str
    text: str
    error: str = ""
    """The error at the end of the traceback that belongs to the message."""
    category: str = ""
    """The class of a warning of Python."""
    of_command: bool = False
    """Whether a command line was refused, or the command has stated why it ends."""

    @property
    def line(self) -> str:
        """Returns the message with the error of its traceback."""
        return self.text if not self.error else f"{self.text.rstrip('.: ')}: {self.error}" if self.text else self.error


@dataclass(slots=True)
class _Record:
    level: str
    lines: list[str] = field(default_factory=list)


class LogReader:
    """Reads a log as it grows."""

    def __init__(self) -> None:
        self._rest = ""
        self._records: dict[str, _Record] = {}  # unfinished ones, by process
        self._traceback: _Traceback | None = None
        self.percent: int | None = None
        """How much of the weights has been loaded, as far as a progress bar shows it."""

    def feed(self, text: str) -> Iterator[Message]:
        """Yields the messages that are complete with this part of the log."""
        *lines, rest = (self._rest + text).split("\n")
        for line in lines:
            yield from self._line(line)
        self._rest = rest[-MOST_CHARACTERS:]
        self._find_progress(self._rest)

    def finish(self) -> Iterator[Message]:
        """Yields what is incomplete at the end of the log."""
        rest, self._rest = self._rest, ""
        if rest:
            yield from self._line(rest)
        for record in self._records.values():
            yield from _message(record)
        self._records.clear()
        yield from self._end_of_traceback()

    def _line(self, raw: str) -> Iterator[Message]:
        line, continues = plain_text(raw), raw.endswith("\r")
        line = line.rstrip("\r")
        self._find_progress(line)
        line = line.rpartition("\r")[2]
        process = ""
        while found := _PROCESS.match(line):
            process, line = found["process"], line[found.end() :]
        if line.startswith("{") and (message := _json_message(line)):
            yield from _message(message)
            return
        line = line[:LONGEST_TEXT]
        # Text of VLLM_LOGGING_PREFIX may come first.
        if found := _RECORD.search(line):
            inner = _PROCESS.search(line[: found.start()])
            process = inner["process"] if inner else process
            record = self._records.pop(process, None)
            if record is None or record.level != found["level"]:
                record = _Record(found["level"])
            record.lines.append(found["text"])
            if continues:
                self._records[process] = record
            else:
                yield from _message(record)
            return
        yield from self._unformatted(line)

    def _unformatted(self, line: str) -> Iterator[Message]:
        if line.startswith(_TRACEBACK):
            if self._traceback is None:
                self._traceback = _Traceback()
            self._traceback.add(line)
            return
        if self._traceback is not None:
            if self._traceback.add(line):
                return
            yield from self._end_of_traceback()
        if line.startswith(_IGNORED):
            self._traceback = _Traceback(ignored=True)
        elif found := _COMMAND.fullmatch(line):
            yield Message("ERROR", found["text"], of_command=True)
        elif found := _UVICORN.fullmatch(line) or _ROOT.fullmatch(line) or _OPENMP.fullmatch(line):
            yield Message(found["level"].upper(), found["text"])
        elif found := _PYTHON_WARNING.fullmatch(line):
            yield Message("WARNING", found["text"], category=found["category"])
        elif found := _NATIVE.fullmatch(line):
            yield Message("WARNING" if found["level"] == "W" else "ERROR", found["text"])

    def _end_of_traceback(self) -> Iterator[Message]:
        traceback, self._traceback = self._traceback, None
        if traceback is not None and traceback.error and not traceback.ignored:
            yield Message("ERROR", "", traceback.error)

    def _find_progress(self, line: str) -> None:
        if found := [*_PERCENT.finditer(line)]:
            self.percent = min(int(found[-1]["percent"]), 100)


class _Traceback:
    """Follows the lines of a traceback, or of several that are chained. The error of the last one is the one that was
    raised."""

    def __init__(self, *, ignored: bool = False) -> None:
        self.error = ""
        self.ignored = ignored
        self._inside = True
        self._validation = False

    def add(self, line: str) -> bool:
        """Returns whether a line belongs to the traceback."""
        if line.startswith(_TRACEBACK):
            self._inside = True
            return True
        if not line.strip() or line.startswith(_CHAINED):
            return True
        if line[0].isspace():
            if self._validation and (text := line.strip()).startswith("Value error, "):
                self.error = text.removeprefix("Value error, ").partition(" [type=")[0]
                self._validation = False
            return True
        if not self._inside or not _EXCEPTION.fullmatch(line):
            return False
        self._inside = False
        self._validation = bool(_VALIDATION.search(line))
        self.error = _error(line)
        return True


def _error(line: str) -> str:
    """Returns the last line of a traceback without the module of the exception. Backplane's own errors state what is
    wrong in full sentences, so their class is left out."""
    if own := _OWN.fullmatch(line):
        return own["text"]
    name, colon, text = line.partition(": ")
    name = name.rpartition(".")[2]
    return "" if name in _OF_ENDS else f"{name}{colon}{text}"


def _message(record: _Record) -> Iterator[Message]:
    if record.level not in LEVELS:
        return
    first, traceback = "", _Traceback()
    for number, line in enumerate(record.lines):
        if line.startswith(_TRACEBACK):
            for rest in record.lines[number:]:
                traceback.add(rest)
            break
        first = first or line.strip()
    if first or traceback.error:
        yield Message(record.level, first, traceback.error)


def _json_message(line: str) -> _Record | None:
    """Returns a record of a log with JSON lines (--logging-config.formatter json), or None for another line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        return None
    lines = [*found["message"].splitlines(), *str(found.get("exc_info") or "").splitlines()]
    return _Record(str(found.get("levelname")), [line[:LONGEST_TEXT] for line in lines])
