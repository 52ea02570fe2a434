"""Report what a given vLLM would break in a plugin, from source alone: nothing is imported or run.

PATH is a plugin's folder, wheel or single file. A vLLM is given as a version (downloaded once if it is not the
installed one), a wheel, a source archive, a source tree, or 'installed'; VERSION@PATH for a tree that does not
say its version. With one vLLM, it reports what is broken there; with several, also what changed from each to
the next.

Exits with 0 if nothing is as bad as --fail-on, 1 if something is, 2 if the command line is wrong or a vLLM or
PATH cannot be read; what can be read is audited all the same.

With --json, the keys are: path, vllm, files, counts, findings; of a finding: rule, name, severity, file, line, column,
vllm, message, remedy, and diff where --diff finds one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from vllm_patchbay.cli import output

PROGRAM = "vllm-patchbay"
HELP = "report what a given vLLM would break in a plugin"

SEVERITIES = ("note", "warning", "error")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="folder, wheel or Python file of the plugin")
    parser.add_argument(
        "--vllm",
        metavar="WHEEL|TREE|VERSION",
        nargs="+",
        action="extend",
        help="vLLM to check against; several are also compared (default: installed)",
    )
    parser.add_argument(
        "--exclude", metavar="GLOB", action="append", default=[], help="leave out files or folders; can be repeated"
    )
    parser.add_argument(
        "--fail-on",
        choices=(*SEVERITIES, "never"),
        default="error",
        help="what makes the exit status 1 (default: error)",
    )
    parser.add_argument(
        "--show", choices=SEVERITIES, default="warning", help="the least severe to list as text (default: warning)"
    )
    parser.add_argument("--diff", action="store_true", help="show how the upstream source of a patched target changed")
    parser.add_argument(
        "--sarif", metavar="FILE", type=Path, help="also write a SARIF 2.1.0 report; '-' for stdout only"
    )
    parser.add_argument("--workers", metavar="N", type=_count, help="processes to use (default: one per core)")
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
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
            # The others are audited all the same; the exit status tells.
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
            # The name of a file need not be text.
            print(line.encode("utf-8", "backslashreplace").decode())
    if unreadable:
        return 2
    worst = report.worst()
    return int(args.fail_on != "never" and worst is not None and worst >= Severity[args.fail_on.upper()])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes (1 or more)")
    return int(text)
