"""Prints for subcommands: results go to stdout and progress goes to stderr, so that results can be piped."""

from __future__ import annotations

import sys

from vllm_backplane.errors import UsageError
from vllm_patchbay.cli.output import add_json_flag, print_json, print_table, progress_of

__all__ = ["add_json_flag", "print_json", "print_table", "progress", "report_error"]

progress = progress_of("vllm-backplane")


def report_error(fault: Exception) -> int:
    """Prints an error and returns the exit status: 2 for a mistake of the user, otherwise 1."""
    # In its processes, vLLM gives the stream a method `write` that adds a prefix. The one of the class adds none.
    type(sys.stderr).write(sys.stderr, f"vllm-backplane: error: {fault}\n")
    return 2 if isinstance(fault, UsageError) else 1
