"""List, explain and check the patches that Backplane applies to vLLM.

'check' reports patches that do not fit a vLLM release and those that are no longer needed. It reads source code without
importing vLLM; --vllm selects the installed vLLM, a version, a wheel or a source tree. For the patches of another
plugin, use 'vllm-patchbay'.
"""

from __future__ import annotations

import argparse

from vllm_backplane.patches import packages
from vllm_patchbay.cli.patches import PatchSelection, add_commands

NAME = "patches"
HELP = "list, check, explain or create the patches that Backplane applies"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    add_commands(actions, PatchSelection("vllm-backplane patches", packages, "vllm_backplane"))


def run(args: argparse.Namespace) -> int:
    """Raises AssertionError. The command line calls the ``run`` that every action sets."""
    raise AssertionError(f"the action {args.action!r} has no function")
