"""Reports what a given vLLM breaks in a plugin. It reads the source of both, and imports and runs nothing of them.

PATH is the plugin's folder, wheel or Python file. A vLLM is a version (downloaded once, unless it is installed), a
wheel, a source archive, a source tree, 'installed', or VERSION@PATH for a tree that does not contain its version.
With one vLLM, the report has what breaks there. With several, it also has what changed from each to the next.

The exit status is 0 if no finding reaches the severity of --fail-on, 1 if one does, and 2 if the command line is
wrong or if a vLLM or PATH cannot be read. The audit covers everything that can be read.

The keys of --json are: path, vllm, files, counts, findings. A finding has: rule, name, severity, file, line,
column, vllm, message, remedy, and diff if --diff found one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from vllm_patchbay.cli import output

PROGRAM = "vllm-patchbay"
HELP = "report what a given vLLM breaks in a plugin"

SEVERITIES = ("note", "warning", "error")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("path", metavar="PATH", type=Path, help="folder, wheel or Python file of the plugin")
    parser.add_argument(
        "--vllm",
        metavar="VLLM",
        nargs="+",
        action="extend",
        help="vLLM to audit against; several are also compared with one another (default: installed)",
    )
    parser.add_argument(
        "--exclude", metavar="GLOB", action="append", default=[], help="skip files or folders; can be repeated"
    )
    parser.add_argument(
        "--fail-on",
        choices=(*SEVERITIES, "never"),
        default="error",
        help="lowest severity that makes the exit status 1 (default: error)",
    )
    parser.add_argument(
        "--show", choices=SEVERITIES, default="warning", help="lowest severity in the text report (default: warning)"
    )
    parser.add_argument("--diff", action="store_true", help="show how vLLM's source of a patched target changed")
    parser.add_argument(
        "--sarif", metavar="FILE", type=Path, help="also write a SARIF 2.1.0 report; '-' writes only that, to stdout"
    )
    parser.add_argument("--workers", metavar="N", type=_count, help="number of processes (default: one per core)")
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    from vllm_patchbay.audit import Severity, audit
    from vllm_patchbay.audit.reports import as_json, as_sarif, as_text
    from vllm_patchbay.errors import PatchbayError
    from vllm_patchbay.upstream import open_tree

    to_stdout = args.sarif is not None and str(args.sarif) == "-"
    if to_stdout and args.json:
        args.parser.error("--json and --sarif - both write to stdout; give one of them a file")
    trees, unreadable = [], False
    for spec in args.vllm or ["installed"]:
        try:
            trees.append(open_tree(spec, output.progress_of(PROGRAM)))
        except PatchbayError as fault:
            # The audit goes on with the others, and the exit status reports the failure.
            print(f"{PROGRAM}: error: {fault}", file=sys.stderr)
            unreadable = True
    if not trees:
        return 2
    try:
        report = audit(
            args.path, trees, exclude=args.exclude, workers=args.workers or len(os.sched_getaffinity(0)), diff=args.diff
        )
    except PatchbayError as fault:
        print(f"{PROGRAM}: error: {fault}", file=sys.stderr)
        return 2
    if args.sarif is not None:
        text = json.dumps(as_sarif(report), indent=2)
        if to_stdout:
            print(text)
        else:
            try:
                args.sarif.write_text(text + "\n", encoding="utf-8")
            except OSError as fault:
                print(f"{PROGRAM}: error: cannot write {args.sarif}: {fault.strerror}", file=sys.stderr)
                return 2
    if args.json:
        output.print_json(as_json(report))
    elif not to_stdout:
        for line in as_text(report, Severity[args.show.upper()]):
            # A file name can contain bytes that are not UTF-8.
            print(line.encode("utf-8", "backslashreplace").decode())
    if unreadable:
        return 2
    worst = report.worst()
    return int(args.fail_on != "never" and worst is not None and worst >= Severity[args.fail_on.upper()])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes (1 or more)")
    return int(text)
