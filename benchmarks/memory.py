"""Breaks down the memory of an engine by process and kind, at the time of its peak.

    python -m benchmarks.memory                                   # ours in int8 with the default model
    python -m benchmarks.memory --variant ours/gguf-q8_0 --json
    python -m benchmarks.memory --pid 1234                        # a running process and its descendants, now

An engine is started and runs the workload of `make bench ARGS="--only memory"`, which also defines the variants.
Figures are proportional set sizes: shared memory is divided among its users, so that the figures of all processes add
up. Libraries are programs and shared objects with their data. The heap has malloc's small allocations. Other memory of
its own is mapped without a file: tensors, large allocations and stacks. Other files are, for example, weights.
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


def measured(variant: str, model: str, timeout: float) -> list[memory.ProcessMemory]:
    """Runs the benchmark's workload and returns the memory of all processes at the peak."""
    [workload] = [workload for workload in workloads.FULL if workload.kind == workloads.MEMORY]
    root = Path(__file__).resolve().parents[1]
    job = drivers.Job(subjects.find(model), Environments(root), 1, timeout, lambda text: print(text, file=sys.stderr))
    recorder = memory.PeakRecorder()
    drivers.peak_memory(job, workload, variants.find(variant), recorder)
    return recorder.processes


def table(processes: list[memory.ProcessMemory]) -> str:
    """Returns a table with a column per process."""
    columns = [(f"{one.name} ({one.pid})", dict(one.parts), one.shared) for one in processes]
    every = {part: sum(one.parts[part] for one in processes) for part in memory.PARTS}
    columns.append(("all", every, sum(one.shared for one in processes)))
    lines = ["| MiB | " + " | ".join(name for name, *_ in columns) + " |", "| --- |" + " ---: |" * len(columns)]
    rows = {part: [parts[part] for _, parts, _ in columns] for part in memory.PARTS}
    rows["all"] = [sum(parts.values()) for _, parts, _ in columns]
    rows["shared with others, included above"] = [shared for *_, shared in columns]
    lines += [f"| {name} | " + " | ".join(f"{value / MIB:,.0f}" for value in row) + " |" for name, row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="ours/int8", help="a variant of `make bench` (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help=", ".join(subject.name for subject in subjects.ALL))
    parser.add_argument("--pid", type=int, help="examine a running process instead of starting an engine")
    parser.add_argument("--timeout", type=float, default=900, help="seconds (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    args = parser.parse_args()
    try:
        processes = memory.tree_parts(args.pid) if args.pid else measured(args.variant, args.model, args.timeout)
    except (ValueError, drivers.EngineFailure, PermissionError) as fault:
        raise SystemExit(f"error: {fault}") from None
    if not processes:
        raise SystemExit(f"error: there is no process {args.pid}; give the number of a running process")
    rows = [asdict(one) | {"all": one.all} for one in processes]
    print(json.dumps(rows, indent=1) if args.json else table(processes))


if __name__ == "__main__":
    main()
