"""Adds Backplane's ASGI middlewares to those of vLLM's HTTP server.

The platform calls `add_to` before vLLM reads a command line, and vLLM imports the middlewares by name.
"""

from __future__ import annotations

import argparse

NAMES = ("vllm_backplane.lora.http_errors.AdapterErrors", "vllm_backplane.http.sleep_gate.SleepGate")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Appends the middlewares to the default of ``--middleware``. A parser without that option is not a server's."""
    given = parser.get_default("middleware")
    # 'vllm snapshot create' defines the option only to reject it.
    if given is not None and "snapshot" not in parser.prog:
        parser.set_defaults(middleware=[*given, *(name for name in NAMES if name not in given)])
