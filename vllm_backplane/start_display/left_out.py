"""Lists the warnings and log lines that do not concern a user of Backplane, with the reason of each.

The display leaves them out. Where there is no display, filters of loggers do. The log file of a start with a display
has all of them, and so has the output with --verbose.
"""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass
from functools import cache

from vllm_backplane.process.start_events import announced
from vllm_backplane.start_display.log_lines import Message


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Describes a warning that is left out."""

    pattern: str
    """Regular expression for the beginning of the warning."""
    module: str
    """The module that issues it, whose name is also that of its logger. A test finds the text in its source."""
    why: str


WARNINGS: tuple[LeftOut, ...] = (
    LeftOut(
        "Inductor compilation was disabled by user settings",
        "vllm.config.vllm",
        "Backplane turns compilation off, because its kernels are compiled already; the user has set nothing.",
    ),
    LeftOut(
        "Enforce eager set, disabling torch.compile",
        "vllm.config.vllm",
        "Backplane sets it in the engine where a device has no graphs, or the user has set it.",
    ),
    LeftOut(
        r"Using custom scheduler class vllm_backplane\.",
        "vllm.config.scheduler",
        "The scheduler is Backplane's, and is tested with every supported release.",
    ),
    LeftOut(
        "Initializing KVConnectorBase_V1. This API is experimental",
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "It is addressed to the authors of connectors.",
    ),
    LeftOut(
        r"Found ulimit of \d{5,} and failed to automatically increase",
        "vllm.utils.system_utils",
        "More than ten thousand files suffice for more requests than a server has at a time; a lower limit is shown.",
    ),
    LeftOut(
        "The chat template requires system-first ordering",
        "vllm.entrypoints.anthropic.serving",
        "It is a note on caching of one kind of request, which most users never send.",
    ),
)
DEVELOPERS = ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning")
"""Classes of Python's warnings that are addressed to the authors of vLLM and its libraries."""
PYTHON_WARNINGS: tuple[tuple[str, str], ...] = (
    (
        "The given buffer is not writable",
        "vLLM makes a tensor of bytes that it received, and only reads it.",
    ),
    (
        "Setuptools is replacing distutils",
        "A library imports distutils after setuptools, which changes nothing for a server.",
    ),
)
"""Beginnings of other warnings of Python, with the reason why they are left out."""

DETAILS: tuple[tuple[str, str], ...] = (
    ("vllm.entrypoints.launchers.launcher", "Available routes are:"),
    ("vllm.entrypoints.launchers.launcher", "Route: "),
    ("vllm.entrypoints.common.startup", "non-default args: "),
    ("vllm.v1.engine.core", "Initializing a V1 LLM engine "),
)
"""Loggers, and beginnings of lines at INFO that become DEBUG: 35 lines for the routes alone, and two of kilobytes."""


@cache
def _matches(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def concerns_user(message: Message) -> bool:
    """Returns whether a warning or error of the log concerns the user."""
    if message.level != "WARNING":
        return True
    if message.category in DEVELOPERS:
        return False
    patterns = [re.escape(text) for text, _why in PYTHON_WARNINGS] if message.category else []
    return not any(_matches(pattern).match(message.text) for pattern in (*patterns, *(one.pattern for one in WARNINGS)))


class _Warnings(logging.Filter):
    """Drops the records of one logger that match the patterns."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._patterns = patterns

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        return not any(_matches(pattern).match(text) for pattern in self._patterns)


class _Details(logging.Filter):
    """Lowers the level of some records to DEBUG. Handlers compare the level after the filters of a logger."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.INFO and str(record.msg).startswith(self._beginnings):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return True


@cache
def install_filters() -> None:
    """Installs the filters in this process, if the start that was announced to it asks for them."""
    start = announced()
    if start is None or not start.filters:
        return
    for module in {one.module for one in WARNINGS}:
        patterns = tuple(one.pattern for one in WARNINGS if one.module == module)
        logging.getLogger(module).addFilter(_Warnings(patterns))
    for name in {name for name, _beginning in DETAILS}:
        logging.getLogger(name).addFilter(_Details(tuple(text for logger, text in DETAILS if logger == name)))
    for text, _why in PYTHON_WARNINGS:
        warnings.filterwarnings("ignore", re.escape(text))
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
