"""The command `vllm-backplane`. One file per command.

A command is a module of this package with four names: ``NAME``, ``HELP`` (one line), ``configure(parser)``
and ``run(args)``, which returns the exit status. Commands import what costs time (torch, vLLM) inside `run`,
so that help is immediate. A command with ``PASSES_ON = True`` finds arguments it does not know in
``args.rest``; for every other command they are an error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast

from vllm_backplane.errors import BackplaneError


class Command(Protocol):
    NAME: str
    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def commands() -> dict[str, Command]:
    """Every module of this package whose name has no leading underscore, by command name."""
    found: dict[str, Command] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            command = cast(Command, importlib.import_module(f"{__name__}.{module.name}"))
            found[command.NAME] = command
    return dict(sorted(found.items()))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-backplane",
        description="Serve models with vLLM on the devices of this machine, and look at what would happen.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vllm-backplane {_version()}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in commands().items():
        # vLLM's arguments pass through, so a prefix of one of ours must not swallow one of vLLM's.
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
    args, rest = build_parser().parse_known_args(argv)
    if rest and not args.passes_on:
        args.parser.error(f"unknown argument: {' '.join(rest)}")
    args.rest = rest
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BackplaneError as fault:
        print(f"vllm-backplane: error: {fault}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever reads has seen enough. Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130


def _version() -> str:
    try:
        return version("vllm-backplane")
    except PackageNotFoundError:
        return "(not installed)"
