"""A large plugin: it completes, in processes of its own, each within bounds. How long it takes, and how much 100,000
lines need, is measured by benchmarks/audit.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from audit_trees import OLD, write_tree

from vllm_patchbay.audit import run as running

BENCHMARK = Path(__file__).resolve().parents[4] / "benchmarks" / "audit.py"

LINES = 45_000

MOST_MEMORY = 1 << 20
"""KiB of one process."""

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
    # Not RUSAGE_SELF, which begins with what the parent had before this program took the process over.
    [own] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    used = [int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]
    rules = Counter(finding.rule_id for finding in report.findings if finding.vllm != "1.0.0")
    print(json.dumps({"files": report.files, "rules": rules, "memory": used, "pools": len(pools)}))
"""


def test_a_generated_plugin_completes_in_bounded_processes(tmp_path):
    spec = importlib.util.spec_from_file_location("audit_benchmark", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    lines = benchmark.write_plugin(tmp_path / "project", LINES)
    assert lines >= LINES
    size = sum(path.stat().st_size for path in (tmp_path / "project").rglob("*.py"))
    assert size > running._WORTH_PROCESSES
    (tmp_path / "run.py").write_text(PROGRAM)
    old = write_tree(tmp_path / "old", OLD)
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "project"), str(old)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["pools"] >= 1
    assert max(told["memory"]) < MOST_MEMORY
    parts = told["files"] - 1
    # One in seventeen modules imports a module that is nowhere; every other one patches a method that is.
    assert told["rules"]["BP101"] >= parts // 17
    assert told["rules"].get("BP201", 0) + told["rules"].get("BP901", 0) >= parts - 1
