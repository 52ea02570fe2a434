"""What the memory of an engine is, process by process, at the moment when it is most.

    python -m benchmarks.memory                                   # ours in int8 with the default model
    python -m benchmarks.memory --variant ours/gguf-q8_0 --json
    python -m benchmarks.memory --pid 1234                        # a process, and all that it has started, now

An engine is started and does what `make bench ARGS="--only memory"` has it do; a variant is one of those. Figures are
proportional set sizes: what processes share counts once, divided among them, so that all of them add up. Libraries are
programs and shared objects with the data they bring; the heap is where malloc takes small pieces from; other memory of
its own is what is mapped without a file: tensors, large allocations, stacks; other files are weights, for example.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.compare import drivers, memory, subjects, variants, workloads
from benchmarks.compare.environments import Environments

MIB = 2**20


def measured(variant: str, model: str, timeout: float) -> list[memory.Held]:
    """At the peak of the benchmark's run."""
    [workload] = [workload for workload in workloads.FULL if workload.kind == workloads.MEMORY]
    root = Path(__file__).resolve().parents[1]
    job = drivers.Job(subjects.find(model), Environments(root), 1, timeout, lambda text: print(text, file=sys.stderr))
    at_peak = memory.AtPeak()
    drivers.peak_memory(job, workload, variants.find(variant), at_peak)
    return at_peak.held


def table(held: list[memory.Held]) -> str:
    """A column per process."""
    columns = [(f"{one.name} ({one.pid})", dict(one.parts), one.shared) for one in held]
    every = {part: sum(one.parts[part] for one in held) for part in memory.PARTS}
    columns.append(("all", every, sum(one.shared for one in held)))
    lines = ["| MiB | " + " | ".join(name for name, *_ in columns) + " |", "| --- |" + " ---: |" * len(columns)]
    rows = {part: [parts[part] for _, parts, _ in columns] for part in memory.PARTS}
    rows["all"] = [sum(parts.values()) for _, parts, _ in columns]
    rows["of it shared with others"] = [shared for *_, shared in columns]
    lines += [f"| {name} | " + " | ".join(f"{value / MIB:,.0f}" for value in row) + " |" for name, row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="ours/int8", help="of `make bench` (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help=", ".join(subject.name for subject in subjects.ALL))
    parser.add_argument("--pid", type=int, help="a process that runs, instead of an engine that is started")
    parser.add_argument("--timeout", type=float, default=900, help="seconds (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="bytes")
    args = parser.parse_args()
    try:
        held = memory.tree_parts(args.pid) if args.pid else measured(args.variant, args.model, args.timeout)
    except (ValueError, drivers.EngineFailure, PermissionError) as fault:
        raise SystemExit(f"error: {fault}") from None
    if not held:
        raise SystemExit(f"error: there is no process {args.pid}; name one that runs")
    print(json.dumps([asdict(one) | {"all": one.all} for one in held], indent=1) if args.json else table(held))


if __name__ == "__main__":
    main()
