"""What Backplane has to say at the door of vLLM's HTTP server: the platform adds these to those of `--middleware`."""

from __future__ import annotations

import argparse

from vllm_backplane.adapter_errors import AdapterErrors
from vllm_backplane.asleep import Asleep

NAMES = (AdapterErrors.NAME, Asleep.NAME)


def add_to(parser: argparse.ArgumentParser) -> None:
    """To the middlewares of a server, which are a user's option; a parser without it is not a server's."""
    given = parser.get_default("middleware")
    # 'vllm snapshot create' knows the option only to refuse it.
    if given is not None and "snapshot" not in parser.prog:
        parser.set_defaults(middleware=[*given, *(name for name in NAMES if name not in given)])
