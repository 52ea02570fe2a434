"""Tests the precision and recall of the auditor over the labelled corpus."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from audit_cases import Case, Label, read_cases
from audit_trees import NEW, OLD, write_tree

from vllm_patchbay.audit import Severity, audit
from vllm_patchbay.upstream import SourceTree, open_tree

pytestmark = pytest.mark.slow

CASES = read_cases()
PAGE = Path(__file__).resolve().parents[4] / "docs" / "plugin" / "audit.md"


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> dict[str, SourceTree]:
    folder = tmp_path_factory.mktemp("trees")
    return {
        "installed": open_tree("installed"),
        "old": open_tree(str(write_tree(folder / "old", OLD))),
        "new": open_tree(str(write_tree(folder / "new", NEW))),
    }


@pytest.fixture(scope="module")
def results(trees, tmp_path_factory) -> list[tuple[Case, Counter[Label]]]:
    return [(case, found_in(case, trees, tmp_path_factory.mktemp("case"))) for case in CASES]


def found_in(case: Case, trees: dict[str, SourceTree], folder: Path) -> Counter[Label]:
    case.write(folder)
    report = audit(folder, [trees[name] for name in case.trees], workers=1)
    # A finding that is the same for both of two versions counts once, as in the text report.
    found = {(f.rule_id, f.file, f.line, f.severity is Severity.NOTE, f.message) for f in report.findings}
    return Counter(label[:4] for label in found)


def test_precision_and_recall_are_at_least_95_percent(results):
    assert len(results) >= 60
    right = sum((found & case.expected).total() for case, found in results)
    precision = right / sum(found.total() for _, found in results)
    recall = right / sum(case.expected.total() for case, _ in results)
    page = PAGE.read_text().replace("\n", " ")
    assert f"precision {precision:.3f} and recall {recall:.3f} today" in page
    assert precision >= 0.95
    assert recall >= 0.95


def test_as_many_cases_look_dangerous_and_are_not(results):
    assert sum(not case.expected for case, _ in results) >= 60


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_each_case(number, results):
    case, found = results[number]
    assert found == case.expected
