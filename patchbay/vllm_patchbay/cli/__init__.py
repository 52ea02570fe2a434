"""Implements the command ``vllm-patchbay``.

The commands import slow modules inside their functions, so that ``--help`` appears at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from vllm_patchbay import __version__
from vllm_patchbay.cli import audit, patches, upgrade
from vllm_patchbay.errors import PatchbayError


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Each command sets ``run``."""
    parser = argparse.ArgumentParser(
        prog=audit.PROGRAM,
        description="Audits vLLM plugins against vLLM releases, and manages their patches of vLLM. 'COMMAND --help' "
        "describes a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{audit.PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in {"audit": audit, "upgrade": upgrade}.items():
        parsing = commands.add_parser(
            name,
            help=command.HELP,
            description=(command.__doc__ or "").strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.configure(parsing)
        parsing.set_defaults(run=command.run, parser=parsing)
    patches.add_commands(commands, patches.PatchSelection())
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    args = build_parser().parse_args(argv)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except PatchbayError as fault:
        print(f"{audit.PROGRAM}: error: {fault}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has closed the pipe. At exit, Python would write to it again and print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130
