"""Prints for subcommands: results go to stdout and progress goes to stderr, so that results can be piped."""

from __future__ import annotations

from vllm_patchbay.cli.output import add_json_flag, print_json, print_table, progress_of

__all__ = ["add_json_flag", "print_json", "print_table", "progress"]

progress = progress_of("vllm-backplane")
