"""Reduces what vLLM raises about a command line or a configuration to one line, and ends with the status 2.

What is found before vLLM is imported is in `early_checks/`. The rest is raised by vLLM's parser, by the validation of
its configuration, which wraps errors of Backplane too, and by its server before it starts an engine. Errors of any
other kind keep their traceback. With VLLM_LOGGING_LEVEL=DEBUG all of them are logged with one.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vllm_backplane.errors import BackplaneError, UsageError
from vllm_backplane.settings.vllm_messages import message_of

READING = ("create_engine_config", "from_cli_args", "validate_parsed_serve_args", "validate_api_server_args")
"""Functions of vLLM that only read what the user has given."""
SERVING = ("setup_server",)
"""Functions of vLLM that need something of the system that the user has named, such as a port."""
RUNNING = ("cmd", "run_headless", "run_multi_api_server")
"""Functions of vLLM that run everything. Only what they raise themselves is about the command line."""


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
