"""What a command line states, where vLLM does not tell its own default from what a user said.

The platform is shown the parser before a command line is read, and the configuration when defaults have been filled
in. So options are noted while they are read. Engines that Python makes have no command line, and nothing is noted.
"""

from __future__ import annotations

import argparse
from typing import Any

_stated: dict[str, Any] = {}


def stated(name: str) -> Any:
    """The value of an option as the command line of this process has it; None where it does not say anything."""
    return _stated.get(name)


def note(parser: argparse.ArgumentParser, name: str) -> None:
    """An option's name is that of the attribute it becomes."""
    for action in parser._actions:  # argparse has no other way to one
        if action.dest == name and not isinstance(action, _Noting):
            kind = type(action)
            action.__class__ = type(kind.__name__, (_Noting, kind), {})


class _Noting(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, namespace, values, option_string)
        _stated[self.dest] = getattr(namespace, self.dest)
