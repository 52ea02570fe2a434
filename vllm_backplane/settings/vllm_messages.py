"""Reduces errors of vLLM's argument parser, and of pydantic, to one line."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from vllm_backplane.errors import UsageError, nearest, short_repr

_MAX_SHOWN_ERRORS = 2
"""Errors of one validation that are shown."""


def parser_class(base: type[argparse.ArgumentParser]) -> type[argparse.ArgumentParser]:
    """Returns a subclass of vLLM's parser that raises UsageError in the place of printing its usage and exiting."""

    class Parser(base):  # type: ignore[valid-type, misc]
        def error(self, message: str) -> NoReturn:
            fault = sys.exception()
            if isinstance(fault, argparse.ArgumentError):
                message = f"{(fault.argument_name or '').split('/')[-1]}: {_message_of_argument(fault)}".lstrip(": ")
            elif message.startswith("unrecognized arguments"):
                message += "; 'vllm serve --help=all' lists the options of vLLM"
            raise UsageError(_one_line(message)) from None

    return Parser


def _message_of_argument(fault: argparse.ArgumentError) -> str:
    raised: BaseException | None = fault.__context__  # the error of the function that converts the value
    while raised is not None:
        if _is_validation(raised):
            return _of_validation(raised)
        raised = raised.__cause__ or raised.__context__
    return fault.message


def message_of(fault: BaseException) -> str:
    """Returns the message of an error in one line, without the wrapping of pydantic."""
    if _is_validation(fault):
        return _one_line(_of_validation(fault))
    if isinstance(fault, LookupError) and fault.args:
        return _one_line(str(fault.args[0]))  # the text of a KeyError has quotes
    return _one_line(str(fault)) or type(fault).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split()).removeprefix("Error: ")


def _is_validation(fault: BaseException) -> bool:
    from pydantic import ValidationError  # late: vLLM has imported it

    return isinstance(fault, ValidationError)


def _of_validation(fault: Any) -> str:
    errors = fault.errors(include_url=False)
    shown = list(dict.fromkeys(_of_error(fault.title, error) for error in errors))
    more = f"; and {len(shown) - _MAX_SHOWN_ERRORS} more" if len(shown) > _MAX_SHOWN_ERRORS else ""
    return "; ".join(shown[:_MAX_SHOWN_ERRORS]) + more


def _of_error(title: str, error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown key {place!r} of {title}{nearest(place, _keys(title))}".rstrip(".")
    if not place or error["type"] in ("value_error", "assertion_error"):
        return message
    return f"{place} is {short_repr(error['input'])}: {message[:1].lower()}{message[1:]}"


def _keys(title: str) -> list[str]:
    import dataclasses

    import vllm.config

    config = getattr(vllm.config, title, None)
    return [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
