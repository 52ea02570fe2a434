"""Reports what an upgrade of vLLM asks of a plugin, as a Markdown list of tasks.

PATH is the plugin's folder, wheel or Python file. --from and --to are releases of vLLM: versions (downloaded once,
unless installed), wheels, source archives, source trees, 'installed', or VERSION@PATH. The list has what breaks for
certain, what changed beneath overrides, patches and guards, which patches may go, new hooks of the
classes that the plugin extends, and new or removed settings. Everything is read from source.

The exit status is 0 if nothing breaks for certain, 1 if something does, and 2 if the command line is wrong or if PATH
or a vLLM cannot be read.

The keys of --json are: path, from, to, items. An item has: section, subject, what, places, diff.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vllm_patchbay.cli import output

PROGRAM = "vllm-patchbay"
HELP = "list what a new vLLM release asks of a plugin"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("path", metavar="PATH", type=Path, help="folder, wheel or Python file of the plugin")
    parser.add_argument(
        "--from",
        dest="before",
        metavar="VLLM",
        default="installed",
        help="vLLM that the plugin serves (default: installed)",
    )
    parser.add_argument("--to", dest="after", metavar="VLLM", required=True, help="vLLM that it is to serve")
    parser.add_argument(
        "--exclude", metavar="GLOB", action="append", default=[], help="skip files or folders; can be repeated"
    )
    parser.add_argument("--no-diff", action="store_true", help="leave out the differences of vLLM's source")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the list to a file instead of stdout")
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    from vllm_patchbay.errors import PatchbayError
    from vllm_patchbay.upgrade import Section, upgrade
    from vllm_patchbay.upgrade.markdown import as_markdown
    from vllm_patchbay.upstream import open_tree

    progress = output.progress_of(PROGRAM)
    try:
        before, after = (open_tree(spec, progress) for spec in (args.before, args.after))
        report = upgrade(
            args.path, before, after, exclude=args.exclude, workers=len(os.sched_getaffinity(0)), progress=progress
        )
    except PatchbayError as fault:
        print(f"{PROGRAM}: error: {fault}", file=sys.stderr)
        return 2
    text = as_markdown(report, diffs=not args.no_diff)
    if args.output:
        output.write(args.output, text)
        progress(f"wrote {args.output}")
    if args.json:
        output.print_json(
            {
                "path": report.path,
                "from": report.before,
                "to": report.after,
                "items": [
                    {
                        "section": item.section.name.lower(),
                        "subject": item.subject,
                        "what": item.what,
                        "places": list(item.places),
                        "diff": item.diff,
                    }
                    for item in report.items
                ],
            }
        )
    elif not args.output:
        print(text, end="")
    for section in Section:
        progress(f"{len(report.of(section))} {section.value[0].lower()}{section.value[1:]}")
    return 1 if report.breaks else 0
