"""Prints results to stdout and progress to stderr, so that results can be piped."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_patchbay.errors import PatchbayError

Progress = Callable[[str], None]


def progress_of(program: str) -> Progress:
    """Returns a function that prints progress messages with the name of a program in front."""

    def progress(message: str) -> None:
        print(f"{program}: {message}", file=sys.stderr, flush=True)

    return progress


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the option --json to a command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def print_json(value: Any) -> None:
    """Prints a value as indented JSON."""
    print(json.dumps(value, indent=2))


def write(path: Path, text: str) -> None:
    """Writes a text file and creates its folder. Raises PatchbayError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise PatchbayError(f"cannot write {path}: {fault.strerror}; choose another path") from fault


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table whose columns are as wide as their widest cell, without trailing spaces."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
