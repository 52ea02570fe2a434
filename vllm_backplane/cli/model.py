"""List, add, remove or verify the models that are served by name.

'add' takes the path of a GGUF file or of a model's folder, or a name on a hub: user/repository:Q4_K_M for the GGUF file
of that quantization, user/repository:file.gguf for that file, and user/repository for safetensors weights, each with an
optional @revision. Files are verified and copied into the cache, or with --link left where they are. An interrupted
download is continued when the same command is run again.

'path' prepares a bundled model if needed and prints the folder or file; 'list' and 'verify' change nothing.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vllm_backplane.cli import _output
from vllm_backplane.errors import BackplaneError, UsageError
from vllm_backplane.models import DEFAULT, BundledModel, damage, models, obtain, packaged, prepared_folder

if TYPE_CHECKING:
    from vllm_backplane.added_models import Entry
    from vllm_backplane.added_models.progress import Progress

NAME = "model"
HELP = "list, add, remove or verify the models that are served by name"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="show the bundled and the added models")
    _output.add_json_flag(listing)

    add = actions.add_parser("add", help="add a model from a path or from a hub")
    add.add_argument("source", metavar="PATH|NAME", help="a GGUF file, a model's folder, or a name on a hub")
    add.add_argument("--name", help="the name to serve it by; otherwise that of the file, folder or repository")
    add.add_argument("--link", action="store_true", help="leave the files where they are")
    add.add_argument("--replace", action="store_true", help="replace an added model of the same name")
    _output.add_json_flag(add)

    remove = actions.add_parser("remove", help="remove an added model, or what an interrupted command left")
    remove.add_argument("name", metavar="NAME", help="the name of an added model")
    remove.add_argument("--force", action="store_true", help="also if a running server uses it")
    _output.add_json_flag(remove)

    path = actions.add_parser("path", help="print the model's folder or file, after preparing it if necessary")
    path.add_argument("name", metavar="NAME", help="the name of a bundled or an added model")
    path.add_argument(
        "--verify",
        action="store_true",
        help="also compare the contents of files; a damaged bundled model is prepared again",
    )
    _output.add_json_flag(path)

    verify = actions.add_parser("verify", help="compare files with the manifest; exit 1 if they differ")
    verify.add_argument("name", metavar="NAME", help="the name of a bundled or an added model")
    _output.add_json_flag(verify)


def run(args: argparse.Namespace) -> int:
    actions = {"list": _list, "add": _add, "remove": _remove, "path": _path, "verify": _verify}
    return actions[args.action](args)


def _list(args: argparse.Namespace) -> int:
    rows = [_bundled_row(model) for model in models()] + _added_rows()
    if args.json:
        _output.print_json(rows)
    else:
        from vllm_backplane.added_models.progress import size_text

        header = ("NAME", "SOURCE", "FORMAT", "SIZE", "STATE")
        table = [
            [row["name"], row["source"], row["format"], size_text(row["size"]) if row["size"] else "", row["fault"]]
            for row in rows
        ]
        for line, row in zip(table, rows, strict=True):
            line[4] = f"{row['state']}: {row['fault']}" if row["fault"] else row["state"]
        _output.print_table(header, table)
    return 0


def _bundled_row(model: BundledModel) -> dict[str, Any]:
    path = packaged(model) or prepared_folder(model)
    fault = "" if packaged(model) else damage(path)
    state = "in its package" if packaged(model) else fault or "prepared"
    size = 0 if fault else sum(one.stat().st_size for one in (path.rglob("*") if path.is_dir() else [path]))
    return {
        "name": model.name,
        "source": f"package {model.requirement}",
        "format": model.format,
        "size": size,
        "state": state,
        "fault": "",
        "path": str(path),
        "served_name": model.served_name,
        "default": model is DEFAULT,
        "summary": model.summary,
    }


def _added_rows() -> list[dict[str, Any]]:
    from vllm_backplane.added_models import entries

    rows = []
    for name in entries.names():
        row = {"name": name, "source": "", "format": "", "size": 0, "state": "unreadable", "fault": "", "path": ""}
        try:
            entry = entries.read(name)
        except BackplaneError as error:
            row["fault"] = str(error)
        else:
            fault = entry.fault()
            row |= {"state": fault.state, "fault": fault.text} if fault else {"state": "complete"}
            row |= {"source": entry.origin, "format": str(entry.format), "size": entry.size}
            row |= {"path": str(entry.path), "served_name": name}
        rows.append(row)
    for name in entries.unfinished():
        fault_text = "being added or removed, or interrupted; add it again to continue, or remove it"
        rows.append(
            {
                "name": name,
                "source": "",
                "format": "",
                "size": 0,
                "state": "unfinished",
                "fault": fault_text,
                "path": "",
            }
        )
    return rows


def _add(args: argparse.Namespace) -> int:
    import os

    from vllm_backplane.added_models import adding, hub, hub_names
    from vllm_backplane.added_models.progress import size_text

    progress = _progress(args)
    hub_name = None if os.path.exists(args.source) else hub_names.parse(args.source)
    if hub_name is None:
        entry = adding.add_path(args.source, args.name, link=args.link, replace=args.replace, progress=progress)
    elif args.link:
        raise UsageError(f"--link is for a path, and there is no {args.source}; check the path, or remove --link")
    else:
        entry = hub.add_from_hub(hub_name, args.name, replace=args.replace, progress=progress)
    if args.json:
        _output.print_json(_described(entry))
    else:
        print(f"{entry.name}: {entry.format}, {size_text(entry.size)} ({entry.origin})")
        print(f"To serve it, run: vllm-backplane serve {entry.name}")
    return 0


def _described(entry: Entry) -> dict[str, Any]:
    files = {name: {"size": file.size, "sha256": file.sha256} for name, file in entry.files.items()}
    return {
        "name": entry.name,
        "source": entry.origin,
        "format": str(entry.format),
        "size": entry.size,
        "path": str(entry.path),
        "files": files,
    }


def _remove(args: argparse.Namespace) -> int:
    if _bundled(args.name) is not None:
        raise UsageError(f"{args.name} is a bundled model; remove its package or its folder in the cache instead")
    from vllm_backplane.added_models import adding

    name = adding.remove(args.name, force=args.force, progress=_progress(args))
    if args.json:
        _output.print_json({"name": name, "removed": True})
    else:
        print(f"{name}: removed")
    return 0


def _path(args: argparse.Namespace) -> int:
    if _bundled(args.name) is not None:
        path = obtain(args.name, _progress(args).report, verify=args.verify)
    else:
        from vllm_backplane.added_models import entries

        entry = entries.find(args.name)
        entry.require_complete(_progress(args), contents=args.verify)
        path = entry.path
    if args.json:
        _output.print_json({"name": args.name, "folder": str(path)})
    else:
        print(path)
    return 0


def _verify(args: argparse.Namespace) -> int:
    model = _bundled(args.name)
    if model is None:
        from vllm_backplane.added_models import entries

        entry = entries.find(args.name)
        found = entry.fault(contents=True, progress=_progress(args))
        path, fault, remedy = entry.path, found.text if found else "", entry.remedy
    elif packaged(model):
        path, fault, remedy = obtain(args.name, verify=True), "", ""  # raises if the file's digest is wrong
    else:
        path = prepared_folder(model)
        fault, remedy = damage(path, hashes=True), f"run: vllm-backplane model path {args.name} --verify"
    if args.json:
        _output.print_json({"name": args.name, "folder": str(path), "whole": not fault, "fault": fault})
    elif fault:
        print(f"{args.name}: {fault} ({path}); {remedy}")
    else:
        print(f"{args.name}: complete ({path})")
    return 1 if fault else 0


def _bundled(name: str) -> BundledModel | None:
    return next((model for model in models() if model.name == name), None)


def _progress(args: argparse.Namespace) -> Progress:
    from vllm_backplane.added_models.progress import QUIET, Progress

    return QUIET if args.json else Progress(_output.progress)
