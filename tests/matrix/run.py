"""Runs the version matrix, every step on every supported vLLM release, and prints a table. Exits with 1 if one fails.

    python tests/matrix/run.py                  # all releases
    python tests/matrix/run.py 0.31.0 --json    # one release, as JSON

'make matrix-environment' creates an environment per release in .venv-matrix-VERSION, which is reused. Its
.backplane/logs has the logs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from steps import STEPS, Outcome, run

from vllm_backplane.settings.releases import RELEASES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [release.version for release in RELEASES]
    parser.add_argument("versions", metavar="VERSION", nargs="*", help=f"one of {', '.join(known)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    args = parser.parse_args(arguments)
    for version in args.versions:
        if version not in known:
            parser.error(f"{version} is not supported; supported: {', '.join(known)}")
    wanted = [release for release in RELEASES if not args.versions or release.version in args.versions]
    outcomes: list[Outcome] = []
    for release in wanted:
        for outcome in run(release, _log):
            outcomes.append(outcome)
            _log(f"{outcome.version} {outcome.step}: {cell(outcome)}")
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        print("\n".join(table(outcomes)))
    return int(any(outcome.failed for outcome in outcomes))


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    versions = list(dict.fromkeys(outcome.version for outcome in outcomes))
    cells = {(outcome.version, outcome.step): cell(outcome) for outcome in outcomes}
    rows = [("vLLM", *STEPS), *((version, *(cells[version, step] for step in STEPS)) for version in versions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    failed = sum(outcome.failed for outcome in outcomes)
    yield f"{failed} of {len(outcomes)} steps failed." if failed else f"All {len(outcomes)} steps passed."


def cell(outcome: Outcome) -> str:
    return outcome.status if outcome.status == "not run" else f"{outcome.status} {outcome.seconds:.0f} s"


def _log(line: str) -> None:
    print(f"[matrix] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
