"""Tests the command `vllm-patchbay audit`: exit codes, the three report formats, and the documentation of the rules."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from audit_cases import read_cases
from audit_trees import NEW, OLD, write_tree
from sarif_schema import sarif_schema

from vllm_patchbay.audit import RULES
from vllm_patchbay.cli import build_parser, main

DOCS = Path(__file__).resolve().parents[4] / "docs" / "plugin"

PLUGIN = """\
import os
import vllm.ops
from vllm.ops import dropped

vllm.ops.fast_norm = print
os.environ["VLLM_OLD"] = "1"
setattr(vllm.ops, compute(), print)
"""


@pytest.fixture
def old(tmp_path):
    return str(write_tree(tmp_path / "old", OLD))


@pytest.fixture
def new(tmp_path):
    return str(write_tree(tmp_path / "new", NEW))


@pytest.fixture
def plugin(tmp_path):
    folder = tmp_path / "project" / "plug"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "a b.py").write_text(PLUGIN)
    return str(folder.parent)


def findings(capsys, *arguments: str) -> list[tuple[str, str, int, str]]:
    main(["audit", *arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    return [(f["rule"], f["severity"], f["line"], f["vllm"]) for f in document["findings"]]


def test_with_one_vllm_what_is_broken_there_is_reported(plugin, new, capsys):
    assert findings(capsys, plugin, "--vllm", new) == [
        ("BP102", "error", 3, "2.0.0"),
        ("BP601", "warning", 6, "2.0.0"),
        ("BP901", "note", 7, "2.0.0"),
    ]


def test_with_two_what_changed_is_reported_too_in_whatever_order(plugin, old, new, capsys):
    expected = [
        ("BP102", "error", 3, "2.0.0"),
        ("BP202", "warning", 5, "2.0.0"),
        ("BP601", "warning", 6, "2.0.0"),
        ("BP901", "note", 7, "1.0.0"),
        ("BP901", "note", 7, "2.0.0"),
    ]
    assert findings(capsys, plugin, "--vllm", old, new) == expected
    assert findings(capsys, plugin, "--vllm", new, "--vllm", old) == expected


def test_the_keys_of_the_json_report(plugin, new, capsys):
    main(["audit", plugin, "--vllm", new, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["path", "vllm", "files", "counts", "findings"]
    assert document["vllm"] == ["2.0.0"]
    assert document["files"] == 2
    assert document["counts"] == {"error": 1, "warning": 1, "note": 1}
    finding = document["findings"][0]
    assert list(finding) == [*("rule", "name", "severity", "file", "line", "column", "vllm", "message", "remedy")]
    assert (finding["file"], finding["name"], finding["column"]) == ("plug/a b.py", "missing-symbol", 22)


@pytest.mark.parametrize(
    ("fail_on", "status"), [("error", 1), ("warning", 1), ("note", 1), ("never", 0)], ids=lambda value: str(value)
)
def test_exit_status_with_an_error(plugin, new, fail_on, status):
    assert main(["audit", plugin, "--vllm", new, "--fail-on", fail_on]) == status


def test_exit_status_without_one(plugin, old, capsys):
    assert main(["audit", plugin, "--vllm", old]) == 0
    assert main(["audit", plugin, "--vllm", old, "--fail-on", "note"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        ["nowhere", "--vllm", "nothing"],
        [".", "--vllm", "0.x"],
        [".", "--vllm", "/dev/null"],
        ["empty"],
        [".", "--exclude", "*"],
        ["README.md"],
    ],
)
def test_what_cannot_be_read_is_status_2(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").touch()
    (tmp_path / "fine.py").touch()
    assert main(["audit", *arguments]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("vllm-patchbay: error: ")
    assert "not a wheel that can be read" not in reported or "/dev/null" in arguments


def test_a_vllm_that_cannot_be_read_does_not_stop_the_others(plugin, new, tmp_path, capsys):
    corrupt = tmp_path / "vllm-1.5-py3-none-any.whl"
    corrupt.write_bytes(b"PK not a wheel")
    assert main(["audit", plugin, "--vllm", str(corrupt), new, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"vllm-patchbay: error: {corrupt} is not a wheel that can be read")
    assert json.loads(shown.out)["vllm"] == ["2.0.0"]
    assert json.loads(shown.out)["counts"]["error"] == 1


@pytest.mark.parametrize(
    "arguments",
    [[], [".", "--fail-on", "x"], [".", "--workers", "0"], [".", "--jsn"], [".", "--json", "--sarif", "-"]],
)
def test_a_wrong_command_line_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(["audit", *arguments])
    assert end.value.code == 2


def test_the_text_report_is_a_table(plugin, old, new, capsys):
    main(["audit", plugin, "--vllm", old, new])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["WHERE", "SEVERITY", "RULE", "VLLM", "WHAT"]
    assert lines[1].startswith("plug/a b.py:3:22  error     BP102  2.0.0  vllm.ops has no dropped")
    assert lines[-1] == "2 files against vLLM 1.0.0 and vLLM 2.0.0: 1 error, 2 warnings, 2 notes (not shown)."
    main(["audit", plugin, "--vllm", old, new, "--show", "note"])
    shown = capsys.readouterr().out
    assert re.search(r"a b\.py:7:1 +note +BP901 +all ", shown)


def test_a_clean_plugin(tmp_path, new, capsys):
    (tmp_path / "fine.py").write_text("import vllm.ops\n")
    assert main(["audit", str(tmp_path / "fine.py"), "--vllm", new]) == 0
    assert capsys.readouterr().out == "1 file against vLLM 2.0.0: nothing found.\n"


def test_the_upstream_diff_on_request(plugin, old, new, capsys):
    main(["audit", plugin, "--vllm", old, new])
    assert "-    return x + 1" not in capsys.readouterr().out
    main(["audit", plugin, "--vllm", old, new, "--diff"])
    shown = capsys.readouterr().out
    assert "    | -    return x + 1" in shown
    assert "    | +    return x + 2" in shown
    main(["audit", plugin, "--vllm", old, new, "--diff", "--json"])
    [changed] = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["rule"] == "BP202"]
    assert "+    return x + 2" in changed["diff"]


def test_by_default_the_installed_vllm(tmp_path, capsys):
    (tmp_path / "p.py").write_text("from vllm.worker.worker import Worker\n")
    assert main(["audit", str(tmp_path / "p.py")]) == 1
    assert "BP101" in capsys.readouterr().out


# --- SARIF


@pytest.fixture(scope="module")
def valid():
    """Checks a report against the published schema."""
    schema = sarif_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema).validate


@pytest.mark.exhaustive
@pytest.mark.download
def test_the_schema_is_the_real_one(valid):
    """The validator rejects documents that SARIF does not allow."""

    def report(results=({"message": {"text": "t"}},), **more):
        return {"version": "2.1.0", "runs": [{"tool": {"driver": {"name": "x"}}, "results": list(results)}], **more}

    valid(report())
    for broken in (
        report(version="2.0.0"),
        report(extra=1),
        report(runs=[{"results": []}]),
        report([{"message": {}}]),
        report([{"message": {"text": "t"}, "level": "bad"}]),
        report([{"message": {"text": "t"}, "locations": [{"physicalLocation": {"region": {"startLine": 0}}}]}]),
    ):
        with pytest.raises(jsonschema.ValidationError):
            valid(broken)


@pytest.fixture
def sarif(plugin, old, new, tmp_path, capsys):
    """Returns the SARIF report of a plugin with a file that cannot be read, written beside the table."""
    (Path(plugin) / "plug" / "broken.py").write_bytes(b"\0")
    file = tmp_path / "report.sarif"
    assert main(["audit", plugin, "--vllm", old, new, "--sarif", str(file), "--diff"]) == 1
    assert "WHERE" in capsys.readouterr().out
    return json.loads(file.read_text())


@pytest.mark.exhaustive
@pytest.mark.download
def test_sarif_follows_the_schema(sarif, valid):
    valid(sarif)


def test_sarif(sarif):
    [run] = sarif["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == list(RULES)
    assert [rules[result["ruleIndex"]] for result in run["results"]] == [r["ruleId"] for r in run["results"]]
    first = run["results"][0]["locations"][0]["physicalLocation"]
    assert first["artifactLocation"]["uri"] == "plug/a%20b.py"
    assert first["region"] == {"startLine": 3, "startColumn": 22}
    identities = [result["partialFingerprints"]["finding/v1"] for result in run["results"]]
    assert len(set(identities)) == len(identities)
    unreadable = run["results"][-1]
    assert unreadable["ruleId"] == "BP902"
    assert "region" not in unreadable["locations"][0]["physicalLocation"]


def test_a_file_name_that_is_not_text(plugin, new, tmp_path, capsys):
    """Linux allows any bytes in a file name. A URI escapes each of them."""
    name = os.fsdecode(b"odd\xff.py")
    (Path(plugin) / "plug" / name).write_text("from vllm.ops import dropped\n")
    file = tmp_path / "report.sarif"
    assert main(["audit", plugin, "--vllm", new, "--sarif", str(file)]) == 1
    capsys.readouterr()
    results = json.loads(file.read_text())["runs"][0]["results"]
    uris = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results}
    assert "plug/odd%FF.py" in uris
    assert main(["audit", plugin, "--vllm", new, "--json"]) == 1
    assert f"plug/{name}" in {finding["file"] for finding in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.exhaustive
@pytest.mark.download
def test_sarif_alone_on_stdout(plugin, new, capsys, valid):
    main(["audit", plugin, "--vllm", new, "--sarif", "-"])
    valid(json.loads(capsys.readouterr().out))


@pytest.fixture
def sarif_of_the_corpus(tmp_path, capsys):
    """Returns the SARIF report of the whole corpus as one plugin, with many kinds of messages and paths."""
    for number, case in enumerate(read_cases()):
        case.write(tmp_path / "all" / f"case {number}")
    main(["audit", str(tmp_path / "all"), "--sarif", "-", "--diff"])
    return json.loads(capsys.readouterr().out)


def test_sarif_has_nearly_every_rule(sarif_of_the_corpus):
    results = sarif_of_the_corpus["runs"][0]["results"]
    assert len({result["ruleId"] for result in results}) >= len(RULES) - 5


@pytest.mark.exhaustive
@pytest.mark.download
def test_sarif_of_nothing_and_of_every_rule_follows_the_schema(tmp_path, capsys, valid, sarif_of_the_corpus):
    (tmp_path / "fine.py").write_text("import vllm\n")
    main(["audit", str(tmp_path / "fine.py"), "--sarif", "-"])
    valid(json.loads(capsys.readouterr().out))
    valid(sarif_of_the_corpus)


def test_a_report_that_cannot_be_written(plugin, new, tmp_path, capsys):
    assert main(["audit", plugin, "--vllm", new, "--sarif", str(tmp_path / "no" / "folder.sarif")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_rules_have_stable_numbers_and_whole_sentences():
    assert list(RULES) == sorted(RULES)
    for rule in RULES.values():
        assert re.fullmatch(r"BP[1-9]\d\d", rule.id)
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
        assert rule.summary.endswith(".") and rule.explanation.endswith(".")
        assert not rule.remedy.endswith(".")


def test_every_rule_is_in_the_corpus():
    """BP902 is about files that a case of the corpus cannot contain."""
    text = "".join(path.read_text() for path in (Path(__file__).parent / "corpus").iterdir())
    assert [rule for rule in RULES if rule not in text] == ["BP902"]


def test_the_page_names_every_rule():
    page = (DOCS / "audit-rules.md").read_text()
    for rule in RULES.values():
        assert f"`{rule.id}`" in page and rule.summary in page


def test_the_documented_workflow_is_one():
    """The recipe for CI is valid YAML, and its commands are commands of this version."""
    page = (DOCS / "audit.md").read_text()
    workflow = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    commands = [
        part.split()[1:]
        for job in workflow["jobs"].values()
        for step in job["steps"]
        for part in step.get("run", "").split(" && ")
        if part.startswith("vllm-patchbay ")
    ]
    assert {command[0] for command in commands} == {"audit", "check"}
    for command in commands:
        assert build_parser().parse_args(command).command == command[0]


@pytest.mark.process
def test_the_documented_use_as_a_library(tmp_path, new):
    """The auditor is for other projects too, so it imports neither vllm_backplane nor vLLM nor PyTorch."""
    program = (
        "import sys\n"
        "from vllm_patchbay.audit import audit\n"
        "from vllm_patchbay.upstream import open_tree\n"
        "report = audit(sys.argv[1], [open_tree(sys.argv[2])])\n"
        "print([f.rule_id for f in report.findings], {'vllm', 'torch', 'vllm_backplane'} & set(sys.modules))\n"
    )
    (tmp_path / "p.py").write_text("import vllm.nothing\n")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "p.py"), new], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['BP101'] set()"


@pytest.mark.exhaustive
@pytest.mark.download
def test_a_real_pair_of_versions(tmp_path, capsys):
    """vLLM 0.32 added the method `_make_model_runner` and changed `init_device` and the kernel."""
    (tmp_path / "p.py").write_text(
        "from vllm.v1.worker.gpu_worker import Worker\n"
        "from vllm.triton_utils.dispatcher import register_kernels\n"
        "Worker._make_model_runner = None\n"
        "Worker.init_device = None\n"
        'register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": None})\n'
    )
    main(["audit", str(tmp_path / "p.py"), "--vllm", "0.31.0", "0.32.0", "--json"])
    found = [(f["rule"], f["line"], f["vllm"]) for f in json.loads(capsys.readouterr().out)["findings"]]
    assert ("BP201", 3, "0.31.0") in found
    assert ("BP201", 3, "0.32.0") not in found
    assert ("BP202", 4, "0.32.0") in found
    assert ("BP202", 5, "0.32.0") in found
