"""Tests that the audit of a large plugin completes in several processes, each within a memory bound.

benchmarks/audit.py measures time and memory for 100,000 lines.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from audit_trees import OLD, write_tree

from vllm_patchbay.audit import run as running

BENCHMARK = Path(__file__).resolve().parents[4] / "benchmarks" / "audit.py"

LINES = 45_000

MAX_MEMORY = 1 << 20
"""Memory bound of one process in KiB."""

PROGRAM = """
import json, resource, sys
from collections import Counter
from vllm_patchbay.audit import audit, run
from vllm_patchbay.upstream import open_tree

if __name__ == "__main__":
    pools = []
    pool = run._pool
    run._pool = lambda *arguments: pools.append(arguments) or pool(*arguments)
    report = audit(sys.argv[1], [open_tree("installed"), open_tree(sys.argv[2])], workers=2)
    # Not RUSAGE_SELF: its maximum includes the memory of the parent before exec.
    [own] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    used = [int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]
    rules = Counter(finding.rule_id for finding in report.findings if finding.vllm != "1.0.0")
    print(json.dumps({"files": report.files, "rules": rules, "memory": used, "pools": len(pools)}))
"""


@pytest.mark.process
def test_a_generated_plugin_completes_in_bounded_processes(tmp_path):
    spec = importlib.util.spec_from_file_location("audit_benchmark", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    lines = benchmark.write_plugin(tmp_path / "project", LINES)
    assert lines >= LINES
    size = sum(path.stat().st_size for path in (tmp_path / "project").rglob("*.py"))
    assert size > running._MIN_PARALLEL_BYTES
    (tmp_path / "run.py").write_text(PROGRAM)
    old = write_tree(tmp_path / "old", OLD)
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "project"), str(old)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    output = json.loads(done.stdout)
    assert output["pools"] >= 1
    assert max(output["memory"]) < MAX_MEMORY
    parts = output["files"] - 1
    # One in seventeen modules imports a module that does not exist; the others set an attribute that does not exist.
    assert output["rules"]["BP101"] >= parts // 17
    assert output["rules"].get("BP201", 0) + output["rules"].get("BP901", 0) >= parts - 1
