"""Imports vLLM once: its own parser judges command lines, and forks of it serve with mistakes.

Its argument is a folder with `requests`, the arguments of each `serve` as JSON. The result is written to `result`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_lines import ACCEPTED, REFUSED

RECORDER = Path(__file__).parents[3] / "scripts" / "record_vllm_options.py"


def served(folder: Path, number: int, arguments: Sequence[str]) -> tuple[int, str]:
    """Returns the exit status and the standard error of `vllm-backplane serve`."""
    from vllm_backplane import cli

    errors = folder / f"errors-{number}"
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(cli.main(["serve", *arguments]))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), errors.read_text()


def judgements(command_lines: Sequence[Sequence[str]]) -> list[str | None]:
    """Returns what vLLM's own parser prints or raises for each, or None if it accepts it."""
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    (command,) = serve.cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    found: list[str | None] = []
    for arguments in command_lines:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            try:
                parser.parse_args(["serve", "model", *arguments])
                found.append(None)
            except SystemExit:
                found.append(printed.getvalue())
            except Exception as fault:
                found.append(f"{type(fault).__name__}: {fault}")
    return found


def main(folder: Path) -> None:
    import vllm.entrypoints.cli.serve  # noqa: F401  # so that the forks need not

    requests = json.loads((folder / "requests").read_text())
    found: dict[str, Any] = {"served": [served(folder, *request) for request in enumerate(requests)]}
    if sys.argv[2:] == ["judge"]:
        found["accepted"] = judgements(ACCEPTED)
        found["refused"] = judgements(REFUSED)
        found["options"] = runpy.run_path(str(RECORDER), run_name="recorder")["described"]()
    (folder / "result").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
