"""List, prepare or verify the bundled models.

'path' prepares the model if needed and prints its folder or file; 'list' and 'verify' change nothing.
"""

from __future__ import annotations

import argparse

from vllm_backplane.cli import _output
from vllm_backplane.models import DEFAULT, damage, find, models, obtain, packaged, prepared_folder

NAME = "model"
HELP = "list, prepare or verify the bundled models"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    names = ", ".join(model.name for model in models())

    listing = actions.add_parser("list", help="show the bundled models")
    _output.add_json_flag(listing)

    path = actions.add_parser("path", help="print the model's folder or file, after preparing it if necessary")
    path.add_argument("name", metavar="NAME", help=f"one of {names}")
    path.add_argument(
        "--verify", action="store_true", help="also compare the contents of files; prepare again if damaged"
    )
    _output.add_json_flag(path)

    verify = actions.add_parser("verify", help="compare files with the manifest; exit 1 if they differ")
    verify.add_argument("name", metavar="NAME", help=f"one of {names}")
    _output.add_json_flag(verify)


def run(args: argparse.Namespace) -> int:
    return {"list": _list, "path": _path, "verify": _verify}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    rows = [
        {
            "name": model.name,
            "served_name": model.served_name,
            "default": model is DEFAULT,
            "summary": model.summary,
            "package": model.requirement,
            "folder": str(packaged(model) or prepared_folder(model)),
            "state": "in its package" if packaged(model) else damage(prepared_folder(model)) or "prepared",
        }
        for model in models()
    ]
    if args.json:
        _output.print_json(rows)
    else:
        columns = ("name", "served_name", "summary", "package", "state")
        _output.print_table(
            [column.upper().replace("_", " ") for column in columns],
            [[str(row[column]) for column in columns] for row in rows],
        )
    return 0


def _path(args: argparse.Namespace) -> int:
    folder = obtain(args.name, _output.progress, verify=args.verify)
    if args.json:
        _output.print_json({"name": args.name, "folder": str(folder)})
    else:
        print(folder)
    return 0


def _verify(args: argparse.Namespace) -> int:
    model = find(args.name)
    if packaged(model):
        folder, fault = obtain(args.name, verify=True), ""  # raises if the file's digest is wrong
    else:
        folder = prepared_folder(model)
        fault = damage(folder, hashes=True)
    if args.json:
        _output.print_json({"name": args.name, "folder": str(folder), "whole": not fault, "fault": fault})
    elif fault:
        print(f"{args.name}: {fault} ({folder}); run: vllm-backplane model path {args.name} --verify")
    else:
        print(f"{args.name}: complete ({folder})")
    return 1 if fault else 0
