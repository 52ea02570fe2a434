"""Tests that a file that cannot be read is reported, and that the rest of the plugin is audited."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from audit_trees import NEW, OLD, write_tree

from vllm_patchbay.audit import Finding, audit
from vllm_patchbay.audit import run as running
from vllm_patchbay.audit.plugin_files import collect
from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream import open_tree

pytestmark = pytest.mark.slow

BAD_IMPORT = "from vllm.ops import dropped\n"


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    return open_tree(str(write_tree(tmp_path_factory.mktemp("new"), NEW)))


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return open_tree(str(write_tree(tmp_path_factory.mktemp("old"), OLD)))


@pytest.fixture
def plugin(tmp_path):
    folder = tmp_path / "project" / "plug"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "good.py").write_text(BAD_IMPORT)
    return folder


def found(path: Path, tree, **options) -> dict[str, list[Finding]]:
    result: dict[str, list[Finding]] = {}
    for finding in audit(path, [tree], **options).findings:
        result.setdefault(finding.file, []).append(finding)
    return result


def assert_left_out(findings: dict[str, list[Finding]], file: str, why: str) -> None:
    [finding] = findings[file]
    assert (finding.rule_id, finding.severity.word) == ("BP902", "warning")
    assert why in finding.message
    assert [f.rule_id for f in findings["plug/good.py"]] == ["BP102"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"def broken(:\n    pass\n", "not valid Python"),
        (b"print 'two'\n", "not valid Python"),
        (b"x = 1\n\0y = 2\n", "NUL"),
        (b"# caf\xe9\nx = 1\n", "encoding"),
        (b"# coding: klingon\nx = 1\n", "encoding"),
        (b"x = " + b"(" * 500 + b")" * 500 + b"\n", "not valid Python"),
        (b"x = " + b"-" * 200_000 + b"1\n", "nested too deeply"),
        (b"x = " + b"+".join([b"1"] * 60_000) + b"\n", "nested too deeply"),
        (b"x = 1\n" * 900_000, "MiB"),
    ],
    ids=["syntax", "python 2", "nul", "latin-1", "codec", "parentheses", "unary", "long sum", "5 MB"],
)
def test_a_file_that_is_not_python(plugin, new, content, why):
    (plugin / "odd.py").write_bytes(content)
    assert_left_out(found(plugin.parent, new), "plug/odd.py", why)


def test_a_syntax_error_has_its_line(plugin, new):
    (plugin / "odd.py").write_text("x = 1\ny = 2\nz = = 3\n")
    [finding] = found(plugin.parent, new)["plug/odd.py"]
    assert finding.line == 3


def test_long_chains_and_long_functions_are_read(plugin, new):
    chain = "if a == 0:\n    pass\n" + "".join(f"elif a == {n}:\n    pass\n" for n in range(800))
    steps = "def f(a):\n" + "".join(f"    if a == {n}:\n        return {n}\n" for n in range(5000))
    (plugin / "long.py").write_text(chain + steps + "    from vllm.ops import dropped\n")
    [finding] = found(plugin.parent, new)["plug/long.py"]
    assert finding.rule_id == "BP102"


def test_what_python_reads_is_read(plugin, new):
    (plugin / "bom.py").write_bytes(b"\xef\xbb\xbf" + BAD_IMPORT.encode())
    (plugin / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n" + BAD_IMPORT.encode())
    (plugin / "crlf.py").write_bytes(b"import os\r\n" + BAD_IMPORT.encode())
    (plugin / "empty.py").write_bytes(b"")
    lines = {file: [f.line for f in findings] for file, findings in found(plugin.parent, new).items()}
    assert lines == {"plug/bom.py": [1], "plug/crlf.py": [2], "plug/good.py": [1], "plug/latin.py": [3]}


def test_links_in_circles_and_to_nowhere(plugin, new):
    (plugin / "loop").symlink_to(plugin.parent, target_is_directory=True)
    (plugin / "self.py").symlink_to(plugin / "self.py")
    (plugin / "gone.py").symlink_to(plugin / "nothing.py")
    (plugin / "folder.py").mkdir()
    findings = found(plugin.parent, new)
    assert {f.rule_id for f in findings["plug/self.py"]} == {"BP902"}
    assert_left_out(findings, "plug/gone.py", "broken link")
    assert set(findings) == {"plug/self.py", "plug/gone.py", "plug/good.py"}


def test_a_linked_folder_is_audited_once(plugin, new, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.py").write_text(BAD_IMPORT)
    (plugin / "vendored").symlink_to(elsewhere, target_is_directory=True)
    (plugin / "vendored_again").symlink_to(elsewhere, target_is_directory=True)
    assert set(found(plugin.parent, new)) == {"plug/good.py", "plug/vendored/linked.py"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(plugin, new):
    (plugin / "secret.py").write_text("x = 1\n")
    (plugin / "secret.py").chmod(0)
    assert_left_out(found(plugin.parent, new), "plug/secret.py", "cannot be read")


def test_a_fifo_does_not_block(plugin, new):
    os.mkfifo(plugin / "pipe.py")
    assert_left_out(found(plugin.parent, new), "plug/pipe.py", "not a regular file")


def test_a_file_that_takes_too_long(plugin, new, monkeypatch):
    monkeypatch.setattr(running, "MAX_FILE_SECONDS", 0.01)
    (plugin / "slow.py").write_text("x = 1\n" * 100_000)
    assert_left_out(found(plugin.parent, new), "plug/slow.py", "to analyse")


def test_processes_find_the_same_as_one(plugin, old, new, monkeypatch):
    (plugin / "odd.py").write_text("def broken(:\n")
    for number in range(30):
        (plugin / f"part_{number}.py").write_text(BAD_IMPORT * 80)
    one = audit(plugin.parent, [old, new], workers=1)
    monkeypatch.setattr(running, "_MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(running, "_CHUNK_BYTES", 5_000)
    two = audit(plugin.parent, [old, new], workers=2)
    assert one == two
    assert len(one.findings) == 2402


def test_a_file_that_ends_its_process(plugin, monkeypatch):
    for number in range(4):
        (plugin / f"part_{number}.py").write_text(BAD_IMPORT)
    collection = collect(plugin.parent)
    monkeypatch.setattr(running, "_MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(running, "_CHUNK_BYTES", 30)
    monkeypatch.setattr(running, "_read_chunk", _dies_at_part_2)
    monkeypatch.setattr(running, "read_one", _dies)
    facts = {f.file: f for f in running._read_all(collection, 2)}
    assert facts["plug/part_2.py"].unreadable == "the process that read it crashed"
    assert [name for name, f in facts.items() if not f.unreadable] == [
        name for name in facts if name != "plug/part_2.py"
    ]
    assert len(facts) == 6


_read_one = running.read_one


def _dies(file, wheel, roots):
    if file.name == "plug/part_2.py":
        os._exit(9)
    return _read_one(file, wheel, roots)


def _dies_at_part_2(files, wheel, roots):
    return [_dies(file, wheel, roots) for file in files]


# --- what belongs to a plugin


def test_builds_caches_and_environments_are_left_out(plugin, new):
    root = plugin.parent
    (root / "pyproject.toml").write_text("[project]\nname = 'plug'\n")
    for folder in (".git", "__pycache__", "build/lib/plug", "dist", "plug.egg-info", "env/lib", "node_modules"):
        (root / folder).mkdir(parents=True)
        (root / folder / "left.py").write_text(BAD_IMPORT)
    (root / "env" / "pyvenv.cfg").write_text("")
    for folder in ("tests", "plug/third_party", "plug/build"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "kept.py").write_text(BAD_IMPORT)
    (plugin / "build" / "__init__.py").write_text("")
    assert set(found(root, new)) == {
        *("plug/build/kept.py", "plug/good.py", "plug/third_party/kept.py", "tests/kept.py")
    }


@pytest.mark.parametrize("pattern", ["tests", "tests/", "tests/*", "*kept.py"])
def test_exclude(plugin, new, pattern):
    (plugin.parent / "tests" / "deep").mkdir(parents=True)
    (plugin.parent / "tests" / "deep" / "kept.py").write_text(BAD_IMPORT)
    assert set(found(plugin.parent, new, exclude=[pattern])) == {"plug/good.py"}


def test_names_of_modules(tmp_path):
    for name in (
        "src/plug/__init__.py",
        "src/plug/sub/__init__.py",
        "src/plug/sub/part.py",
        "tests/test_it.py",
        "setup.py",
        "plug2/__init__.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    modules = {file.name: file.module for file in collect(tmp_path).plugin.files}
    assert modules == {
        "src/plug/__init__.py": "plug",
        "src/plug/sub/__init__.py": "plug.sub",
        "src/plug/sub/part.py": "plug.sub.part",
        "tests/test_it.py": "test_it",
        "setup.py": "setup",
        "plug2/__init__.py": "plug2",
    }
    inside = {file.name: file.module for file in collect(tmp_path / "src" / "plug" / "sub").plugin.files}
    assert inside == {"__init__.py": "plug.sub", "part.py": "plug.sub.part"}


def test_a_single_file(plugin, new):
    report = audit(plugin / "good.py", [new])
    assert [(f.file, f.rule_id) for f in report.findings] == [("good.py", "BP102")]


def plugin_wheel(path: Path, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("plug/__init__.py", "def register():\n    return None\n")
        archive.writestr("plug/good.py", BAD_IMPORT)
        archive.writestr(
            "plug-1.dist-info/entry_points.txt",
            "[vllm.general_plugins]\none = plug:register\ntwo = plug:registers\n",
        )
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_plugins_wheel(tmp_path, new):
    path = plugin_wheel(tmp_path / "plug-1-py3-none-any.whl", **{"plug/odd.py": b"def (:\n", "../evil.py": b"x"})
    findings = found(path, new)
    assert_left_out(findings, "plug/odd.py", "not valid Python")
    assert [(f.rule_id, f.line) for f in findings["entry_points.txt"]] == [("BP501", 3)]
    assert set(findings) == {"plug/odd.py", "plug/good.py", "entry_points.txt"}


def test_a_corrupt_plugin_wheel(tmp_path, new):
    path = tmp_path / "plug.whl"
    path.write_bytes(b"PK nothing")
    with pytest.raises(PatchbayError, match="download it again"):
        audit(path, [new])


@pytest.mark.parametrize("project", ["pyproject.toml", "setup.cfg"])
def test_a_project_file_that_cannot_be_read(plugin, new, project):
    (plugin.parent / project).write_text("[[[ nonsense\n")
    assert_left_out(found(plugin.parent, new), project, "entry points cannot be read")


def test_a_plugin_that_is_not_there(new, tmp_path):
    with pytest.raises(PatchbayError, match="does not exist"):
        audit(tmp_path / "nothing", [new])


def test_nothing_of_the_plugin_or_of_vllm_is_run(plugin, tmp_path):
    """The plugin and the vLLM of this test would create a file if they were run."""
    mark = tmp_path / "ran"
    trap = f"open({str(mark)!r}, 'w').close()\n"
    tree = write_tree(tmp_path / "trap", {**NEW, "__init__": trap + NEW["__init__"], "ops": trap + NEW["ops"]})
    (plugin / "__init__.py").write_text(trap + "def register():\n    pass\n")
    (plugin.parent / "setup.py").write_text(trap)
    assert found(plugin.parent, open_tree(str(tree)))
    assert not mark.exists()


def test_an_upstream_module_that_cannot_be_parsed_is_unresolved(plugin, tmp_path):
    tree = write_tree(tmp_path / "bad", {**NEW, "ops": "def broken(:\n"})
    [finding] = found(plugin.parent, open_tree(str(tree)))["plug/good.py"]
    assert (finding.rule_id, finding.severity.word) == ("BP901", "note")


def damaged_wheel(path: Path, name: str) -> Path:
    """Writes a wheel of the small vLLM in which the content of one file does not match its checksum."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for module, text in NEW.items():
            archive.writestr(f"vllm/{module}.py", text)
        archive.writestr("vllm-2.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 2.0.0\n")
    content = path.read_bytes()
    source = NEW[name].encode()
    assert content.count(source) == 1
    path.write_bytes(content.replace(source, bytes(byte ^ 1 for byte in source)))
    return path


def test_an_upstream_file_that_is_damaged_is_reported_and_nothing_is_guessed(plugin, tmp_path):
    (plugin / "patch.py").write_text(
        "import os\nfrom vllm.engine import Engine\nfrom vllm.custom_op import CustomOp\n"
        "Engine.no_such_method = 3\nos.environ['VLLM_NO_SUCH'] = '1'\n"
        "CustomOp.register_oot(name='NoSuchLayer')(object)\n"
    )
    tree = open_tree(str(damaged_wheel(tmp_path / "vllm-2.0.0-py3-none-any.whl", "engine")))
    findings = found(plugin.parent, tree)
    [left_out] = findings["vllm/engine.py"]
    assert (left_out.rule_id, left_out.severity.word, left_out.vllm) == ("BP902", "warning", "2.0.0")
    assert "damaged" in left_out.message
    assert {(f.line, f.rule_id) for f in findings["plug/patch.py"]} == {
        (2, "BP901"),
        (4, "BP901"),
        (5, "BP901"),
        (6, "BP901"),
    }
    assert [f.rule_id for f in findings["plug/good.py"]] == ["BP102"]


def test_an_upstream_owner_that_cannot_be_parsed_is_unresolved(plugin, tmp_path):
    (plugin / "patch.py").write_text("import vllm.engine\nvllm.engine.Engine.no_such_method = 3\n")
    tree = write_tree(tmp_path / "bad", {**NEW, "engine": "def broken(:\n"})
    findings = found(plugin.parent, open_tree(str(tree)))["plug/patch.py"]
    assert [(f.line, f.rule_id) for f in findings] == [(2, "BP901")]
