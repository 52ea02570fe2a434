"""Runs the fuzz targets on their corpora and on changes of them, and saves every input that breaks a rule.

    python -m tests.fuzz                        every target for 60 seconds
    python -m tests.fuzz gguf-file --seconds 600
    python -m tests.fuzz --runs 0               the corpora alone

The exit status is 1 if an input broke a rule.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

from tests.fuzz.campaign import Report, Target, campaign

CORPUS = Path(__file__).parent / "corpus"


def all_targets() -> dict[str, Target]:
    """Returns every target by name."""
    from tests.fuzz.targets import adapters, gguf, peers, schemes

    found = [*gguf.targets(), *peers.targets(), *schemes.targets(), *adapters.targets()]
    return {target.name: target for target in found}


def corpus(name: str) -> list[bytes]:
    """Returns the inputs of a target in the repository."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def main() -> int:
    """Runs the command and returns its exit status."""
    targets = all_targets()
    parser = argparse.ArgumentParser(
        prog="make fuzz ARGS=…", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of: {', '.join(targets)} (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time per target (default: 60)")
    parser.add_argument("--runs", type=int, default=10**9, help="changed inputs per target (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("build/fuzz"), help="folder of inputs that break a rule")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--keep", action="store_true", help="save inputs that reach new lines in the output folder too")
    given = parser.parse_args()
    unknown = sorted(set(given.targets) - targets.keys())
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; the targets are: {', '.join(targets)}")
    results = {}
    for name in given.targets or targets:
        report = campaign(targets[name], corpus(name), given.runs, given.seconds, given.seed)
        results[name] = summary(report)
        print(f"{name:22} {report.accepted:7} accepted  {report.refused:7} refused  {len(report.failures)} failures")
        for failure in report.failures:
            print(f"  {_saved(given.output, name, failure.data)}: {failure.reason}")
        for data in report.kept if given.keep else ():
            _saved(given.output / "kept", name, data)
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any(one["failures"] for one in results.values()) else 0


def summary(report: Report) -> dict[str, object]:
    """Returns a report for a JSON file."""
    return {
        "accepted": report.accepted,
        "refused": report.refused,
        "failures": [{"reason": failure.reason, "input": failure.data.hex()} for failure in report.failures],
        "lines": sorted(report.lines),
    }


def _saved(folder: Path, name: str, data: bytes) -> Path:
    """Saves an input under its digest."""
    path = folder / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    sys.exit(main())
