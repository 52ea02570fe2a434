"""Reduces what vLLM raises about a command line or a configuration to one line, and ends with the status 2.

What is found before vLLM is imported is in `early_checks/`. The rest is raised by vLLM's parser, by the validation of
its configuration, which wraps errors of Backplane too, and by its server before it starts an engine. Errors of any
other kind keep their traceback. With VLLM_LOGGING_LEVEL=DEBUG all of them are logged with one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from vllm_backplane.errors import BackplaneError, UsageError, nearest, short_repr

READING = ("create_engine_config", "from_cli_args", "validate_parsed_serve_args", "validate_api_server_args")
"""Functions of vLLM that only read what the user has given."""
SERVING = ("setup_server",)
"""Functions of vLLM that need something of the system that the user has named, such as a port."""
RUNNING = ("cmd", "run_headless", "run_multi_api_server")
"""Functions of vLLM that run everything. Only what they raise themselves is about the command line."""
_ERRORS = 2
"""Errors of one validation that are shown."""


def parser_class(base: type[argparse.ArgumentParser]) -> type[argparse.ArgumentParser]:
    """Returns a subclass of vLLM's parser that raises UsageError in the place of printing its usage and exiting."""

    class Parser(base):  # type: ignore[valid-type, misc]
        def error(self, message: str) -> NoReturn:
            fault = sys.exception()
            if isinstance(fault, argparse.ArgumentError):
                message = f"{(fault.argument_name or '').split('/')[-1]}: {_message_of_argument(fault)}".lstrip(": ")
            raise UsageError(_one_line(message)) from None

    return Parser


def _message_of_argument(fault: argparse.ArgumentError) -> str:
    raised: BaseException | None = fault.__context__  # the error of the function that converts the value
    while raised is not None:
        if _is_validation(raised):
            return _of_validation(raised)
        raised = raised.__cause__ or raised.__context__
    return fault.message


@contextmanager
def in_arguments() -> Iterator[None]:
    """Raises UsageError for what vLLM raises about its command line."""
    try:
        yield
    except BackplaneError:
        raise
    except Exception as fault:  # vLLM raises many types here, and reads nothing but what the user has given
        _log(fault)
        raise UsageError(message_of(fault)) from None


def mistake_behind(fault: BaseException) -> UsageError | None:
    """Returns the mistake if vLLM raised `fault` while it read its arguments or made its configuration, else None."""
    if isinstance(fault, UsageError) or not isinstance(fault, Exception):
        return None
    places = [
        frame.f_code.co_name if frame.f_globals.get("__name__", "").startswith("vllm.") else ""
        for frame, _ in traceback.walk_tb(fault.__traceback__)
    ]
    if not {*READING, *SERVING} & {*places} and not {*RUNNING} & {*places[-1:]}:
        return None
    if not _may_be_mistake(fault, places):
        return None
    _log(fault)
    return UsageError(message_of(fault))


def _may_be_mistake(fault: Exception, places: Sequence[str]) -> bool:
    expected: tuple[type[Exception], ...] = (BackplaneError, ValueError, OSError, ImportError, NotImplementedError)
    if "validate_api_server_args" in places:
        expected = (*expected, LookupError)
    if str(fault):
        expected = (*expected, AssertionError)
    # transformers checks the types in config.json with classes of huggingface_hub
    of_hub = any(base.__name__ == "StrictDataclassError" for base in type(fault).__mro__)
    return isinstance(fault, expected) or of_hub or type(fault).__module__ == "vllm.exceptions"


def _log(fault: BaseException) -> None:
    logging.getLogger("vllm." + __name__).debug("vLLM refuses the command line.", exc_info=fault)


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
    more = f"; and {len(shown) - _ERRORS} more" if len(shown) > _ERRORS else ""
    return "; ".join(shown[:_ERRORS]) + more


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
