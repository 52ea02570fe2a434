"""Implements the command `vllm-backplane`, with one module per subcommand.

A subcommand is a module of this package with four names: ``NAME``, ``HELP`` (one line), ``configure(parser)`` and
``run(args)``, which returns the exit status. Subcommands import torch and vLLM inside `run`, so that help is immediate.
A subcommand with ``PASSES_ON = True`` gets the arguments that its parser does not recognize in ``args.rest``; for every
other subcommand such arguments are an error.
"""

from __future__ import annotations

from vllm_backplane.cli import _interrupts  # isort: skip  # first, so that Ctrl-C during the imports below is silent

import argparse
import importlib
import os
import pkgutil
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from vllm_backplane import __version__
from vllm_backplane.cli import _output
from vllm_backplane.errors import BackplaneError
from vllm_patchbay.errors import PatchbayError


class Command(Protocol):
    """Defines the interface of a subcommand's module."""

    NAME: str
    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def commands() -> dict[str, Command]:
    """Returns the subcommands by name: every module of this package whose name has no leading underscore."""
    found: dict[str, Command] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            command = cast(Command, importlib.import_module(f"{__name__}.{module.name}"))
            found[command.NAME] = command
    return dict(sorted(found.items()))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-backplane",
        description="Serve models with vLLM on the devices of this machine, and diagnose the installation.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vllm-backplane {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in commands().items():
        # vLLM's arguments pass through, so argparse must not take an option of vLLM for an abbreviation of ours.
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=(command.__doc__ or command.HELP).strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.configure(subparser)
        passes_on = getattr(command, "PASSES_ON", False)
        subparser.set_defaults(run=command.run, passes_on=passes_on, parser=subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["audit"]:
        return _report_moved_auditor(arguments)
    args, rest = build_parser().parse_known_args(arguments)
    if rest and not args.passes_on:
        args.parser.error(f"unknown argument: {' '.join(rest)}")
    args.rest = rest
    were_silent = _interrupts.raise_exceptions()
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except (BackplaneError, PatchbayError) as fault:
        return _output.report_error(fault)
    except BrokenPipeError:
        # The reader has closed its end. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130
    finally:
        if were_silent:  # Ctrl-C may come, or come again, during the teardown of the interpreter
            _interrupts.end_silently()


def _report_moved_auditor(arguments: Sequence[str]) -> int:
    """Prints the command line that replaces the former subcommand, and returns the status of a usage error."""
    command = shlex.join(["vllm-patchbay", *arguments])
    print(
        f"vllm-backplane: error: the auditor is the command 'vllm-patchbay audit' now; run: {command}", file=sys.stderr
    )
    return 2
