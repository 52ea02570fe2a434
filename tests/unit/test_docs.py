"""The documentation says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import feature_matrix
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_generated_tables_are_fresh() -> None:
    run = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_example_device_is_as_small_as_the_readme_says() -> None:
    source = (ROOT / "examples/minimal_device/minimal_device.py").read_text()
    assert len(source.splitlines()) <= 30
    assert source.rstrip() in (ROOT / "README.md").read_text()


def test_every_linked_file_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_what_does_not_run_has_a_link_or_a_reason() -> None:
    page = (ROOT / "docs/serve/model-families.md").read_text()
    table = page.split("## What vLLM locks out or does not run here\n")[1].split("\n## ")[0]
    [head, _, *rows] = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line.startswith("|")
    ]
    assert head == ["what", "why it does not run", "opened by", "upstream"]
    known = {row[0] for row in rows}
    for wanted in (
        *("EPLB", "DeepSeek-V3.2", "--enable-dbo", "further mixers", "prefix caching", "speculation"),
        *("LoRA adapters of experts", "fp8 checkpoints", "mxfp4 checkpoints"),
        *("both directions", "hash routing", "R-SWA"),
    ):
        assert sum(wanted.lower() in what.lower() for what in known) == 1, wanted
    for what, reason, opened, upstream in rows:
        assert reason and re.match(r"(an? )?(hooks?|patch|nothing)\b", opened), what
        links = re.findall(r"\]\((\S+)\)", upstream)
        assert links or re.fullmatch(r"none: .{10,}", upstream), what
        assert all(re.fullmatch(r"https://github\.com/vllm-project/vllm/(issues|pull)/\d+", link) for link in links)


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z]+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_quotations_are_from_the_source() -> None:
    """A code block whose first line names a file holds lines of that file, one after another."""
    page = (ROOT / "docs/plug-your-npu.md").read_text()
    found = 0
    for block in re.findall(r"^```\w+\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        first, _, quoted = block.partition("\n")
        named = re.fullmatch(r"(?:#|//|/\*) (\S+\.\w+)(?: \*/)?", first)
        if named is None:
            continue
        found += 1
        assert quoted.rstrip() in (ROOT / named[1]).read_text(), f"{named[1]} no longer holds:\n{quoted}"
    assert found >= 10


def test_files_that_the_walk_names_exist() -> None:
    page = (ROOT / "docs/plug-your-npu.md").read_text()
    named = set(re.findall(r"`((?:csrc|tests|vllm_backplane|worker)/[\w/.-]+)`", page))
    assert len(named) >= 10
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "vllm_backplane" / name).exists(), name


def test_the_matrix_has_what_tests_show_and_nothing_else(request: pytest.FixtureRequest) -> None:
    """As far as tests were collected together with this one; `make test` collects all."""
    if request.config.getoption("--features") == feature_matrix.RECORD:
        pytest.skip("features are being recorded")
    recorded = feature_matrix.read(feature_matrix.RECORD)
    assert not [entry for entry in recorded if not feature_matrix.exists(entry)]
    entries = {(entry.feature, entry.device, entry.refused, entry.test) for entry in recorded}
    marked = {(*shown, item.nodeid) for item in request.session.items for shown in feature_matrix.marked(item)}
    collected = {item.nodeid for item in request.session.items}
    assert not marked - entries, "run make features"
    assert not {entry for entry in entries if entry[3] in collected} - marked, "run make features"
    if not feature_matrix.chosen_singly(request.session):
        files = {test.partition("::")[0] for test in collected}
        gone = {entry for entry in entries if entry[3].partition("::")[0] in files and entry[3] not in collected}
        assert not gone, "run make features"
