"""A large plugin: it completes, in bounded processes. Time and memory are measured by benchmarks/audit.py."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

from audit_trees import OLD, write_tree

from vllm_backplane.audit import audit
from vllm_backplane.upstream import open_tree

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "audit.py"


def test_a_generated_plugin_completes(tmp_path):
    spec = importlib.util.spec_from_file_location("audit_benchmark", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    lines = benchmark.write_plugin(tmp_path / "project", 5_000)
    assert lines >= 5_000
    trees = [open_tree("installed"), open_tree(str(write_tree(tmp_path / "old", OLD)))]
    report = audit(tmp_path / "project", trees, workers=2)
    installed = Counter(finding.rule_id for finding in report.findings if finding.vllm != "1.0.0")
    parts = report.files - 1
    # One in seventeen modules imports a module that is nowhere; every other one patches a method that is.
    assert installed["BP101"] == 0 if parts < 17 else installed["BP101"] >= 1
    assert installed["BP201"] + installed["BP901"] >= parts - 1
