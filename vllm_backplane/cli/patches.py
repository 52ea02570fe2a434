"""The patches of vLLM that Backplane applies: which there are, why, whether they fit a vLLM, and which can go.

Patches of another plugin are the business of 'vllm-patchbay'. 'check' reads source and imports nothing of vLLM; the
vLLM may be the installed one, a version, a wheel or a tree.
"""

from __future__ import annotations

import argparse

from vllm_backplane.patches import packages
from vllm_patchbay.cli.patches import Scope, add_commands

NAME = "patches"
HELP = "list, check, explain or start the patches that Backplane applies"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    add_commands(actions, Scope("vllm-backplane patches", packages))


def run(args: argparse.Namespace) -> int:
    """Is replaced by the action's own function, which the parser sets."""
    raise AssertionError(f"the action {args.action!r} has no function")
