"""Reads the entry points that a project declares, without building it.

The sources are pyproject.toml, setup.cfg, setup.py and the metadata of a wheel.
"""

from __future__ import annotations

import ast
import configparser
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import RULES, Severity
from vllm_patchbay.upstream.source import SourceError, decode_source


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """Describes one declared entry point, and where the project declares it."""

    group: str
    name: str
    value: str
    """The object, as ``module:object``."""
    file: str
    line: int


def from_project(path: Path, name: str) -> tuple[list[EntryPoint], list[Finding]]:
    """Returns the entry points of a project file, and findings about those that cannot be read.

    `name` is the file in the findings.
    """
    try:
        text = decode_source(path.read_bytes(), "it")
        if path.name == "pyproject.toml":
            return list(_from_pyproject(text, name)), []
        if path.name == "setup.cfg":
            return list(_from_setup_cfg(text, name)), []
        return _from_setup_py(text, name)
    except (OSError, SourceError, tomllib.TOMLDecodeError, configparser.Error, SyntaxError, RecursionError) as fault:
        if path.name == "setup.py" and not isinstance(fault, OSError):
            # The file is also audited as Python, which reports the fault.
            return [], []
        rule = RULES["BP902"]
        why = str(fault).replace("\n", " ")
        return [], [Finding(rule.id, rule.severity, name, 0, 0, f"its entry points cannot be read: {why}")]


def from_metadata(text: str, name: str) -> list[EntryPoint]:
    """Returns the entry points in the ``entry_points.txt`` of a wheel."""
    try:
        return list(_from_ini(text, name))
    except configparser.Error:
        return []


def _from_pyproject(text: str, file: str) -> Iterator[EntryPoint]:
    document = tomllib.loads(text)
    project = document.get("project", {})
    groups: dict[str, object] = dict(project.get("entry-points", {}))
    groups["console_scripts"] = project.get("scripts", {})
    poetry = document.get("tool", {}).get("poetry", {})
    groups.update(poetry.get("plugins", {}))
    for group, entries in groups.items():
        yield from _entries(group, entries, file, text)


def _entries(group: str, entries: object, file: str, text: str) -> Iterator[EntryPoint]:
    if isinstance(entries, Mapping):
        for name, value in entries.items():
            if isinstance(value, str):
                yield EntryPoint(group, str(name), value, file, _line_of(text, str(name), value))


def _from_setup_cfg(text: str, file: str) -> Iterator[EntryPoint]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    if parser.has_section("options.entry_points"):
        for group, lines in parser.items("options.entry_points"):
            for line in lines.splitlines():
                name, equals, value = line.partition("=")
                if equals:
                    yield EntryPoint(
                        group, name.strip(), value.strip(), file, _line_of(text, name.strip(), value.strip())
                    )


def _from_ini(text: str, file: str) -> Iterator[EntryPoint]:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    for group in parser.sections():
        for name, value in parser.items(group):
            yield EntryPoint(group, name, value.strip(), file, _line_of(text, name, value.strip()))


def _from_setup_py(text: str, file: str) -> tuple[list[EntryPoint], list[Finding]]:
    tree = ast.parse(text)
    tables = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "entry_points":
                    value = keyword.value
                    value = tables.get(value.id, value) if isinstance(value, ast.Name) else value
                    return _from_literal(value, file)
    return [], []


def _from_literal(node: ast.expr, file: str) -> tuple[list[EntryPoint], list[Finding]]:
    found: list[EntryPoint] = []
    doubts: list[Finding] = []

    def doubt(at: ast.AST) -> None:
        line, column = getattr(at, "lineno", 0), getattr(at, "col_offset", -1) + 1
        what = "the entry points are computed when the project is built"
        doubts.append(Finding("BP901", Severity.NOTE, file, line, column, what))

    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _from_text(node.value, node.lineno, file), doubts
    if not isinstance(node, ast.Dict):
        doubt(node)
        return found, doubts
    for key, value in zip(node.keys, node.values, strict=True):
        elements = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
        if not isinstance(key, ast.Constant):
            doubt(value)
            continue
        for element in elements:
            if isinstance(element, ast.Constant) and isinstance(element.value, str):
                for line in element.value.splitlines():
                    name, equals, target = line.partition("=")
                    if equals:
                        found.append(EntryPoint(str(key.value), name.strip(), target.strip(), file, element.lineno))
            else:
                doubt(element)
    return found, doubts


def _from_text(text: str, first_line: int, file: str) -> list[EntryPoint]:
    """Returns the entry points of a string in the form of entry_points.txt, which may be indented like the source."""
    lines = [line.strip() for line in text.splitlines()]
    try:
        found = list(_from_ini("\n".join(lines), file))
    except configparser.Error:
        return []
    return [replace(entry, line=first_line + entry.line - 1) for entry in found]


def _line_of(text: str, name: str, value: str) -> int:
    """Returns the first line that has both strings, else 1: the parsers of these formats do not report lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if name in line and value in line:
            return number
    return 1
