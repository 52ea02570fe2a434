"""Collects facts about a whole vLLM: its class names, the environment variables it reads, the plugin groups it loads.

These facts need every module. Regular expressions over the text find them in one pass of about a second, where parsing
would have to read a million lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_patchbay.upstream.source import SourceTree, module_texts
from vllm_patchbay.upstream.symbols import SymbolIndex

# Each pattern begins with literal text, because Python searches for that much faster.
_CLASS = re.compile(r"class[ \t]+(\w+)")
_DEFINITIONS = tuple(re.compile(rf"\n{word}[ \t]+(\w+)") for word in ("class", "def", "async def"))
_GROUP = re.compile(r"\bGROUP\w*\s*(?::[^=\n]+)?=\s*\(?\s*[\"'](\w+\.\w+)[\"']|_GROUP\s*=\s*[\"'](\w+\.\w+)[\"']")
_READ = re.compile(
    r"(?:environ(?:\.(?:get|setdefault|pop))?\s*[\[(]|getenv\s*\()\s*[\"']([A-Z][A-Z0-9_]+)[\"']"
    r"|[\"']([A-Z][A-Z0-9_]+)[\"']\s*(?:not\s+)?in\s+os\.environ"
)
_READ_BY_CONSTANT = re.compile(
    r"(?:environ(?:\.(?:get|setdefault|pop))?\s*[\[(]|getenv\s*\()\s*(?:\w+\.)*([A-Z]\w*)\s*[\]),]"
    r"|\b([A-Z]\w*)\s+(?:not\s+)?in\s+os\.environ"
)
_CONSTANT = re.compile(r"\n([A-Z]\w*)(?:[ \t]*:[^=\n]+)?[ \t]*=[ \t]*[\"']([A-Z][A-Z0-9_]+)[\"']")

VARIABLES_MODULE = "envs"
VARIABLES_TABLE = "environment_variables"


@dataclass(frozen=True, slots=True)
class Survey:
    """Holds facts about all modules of one source tree."""

    classes: dict[str, tuple[str, ...]]
    """Modules that define a class of the name."""
    definitions: dict[str, tuple[str, ...]]
    """Modules that define a class or function of the name at their top level."""
    groups: frozenset[str]
    """Entry-point groups that are loaded; empty if none was found."""
    variables: frozenset[str]
    """Environment variables that are read."""
    imports: frozenset[str]
    """Modules of the package that the package imports by full name. Whether one of them that is not in the tree exists
    depends on how the package was built."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Files that could not be read, with the reason. A name that is missing above may be in one of them."""

    def __bool__(self) -> bool:
        return bool(self.classes)


def survey(tree: SourceTree) -> Survey:
    """Returns the survey of a tree, which is made once per tree."""
    found: Survey | None = tree.derived.get("survey")
    if found is None:
        found = tree.derived["survey"] = _survey(tree)
    return found


def _survey(tree: SourceTree) -> Survey:
    classes: dict[str, list[str]] = {}
    definitions: dict[str, list[str]] = {}
    groups: set[str] = set()
    variables: set[str] = set()
    constants: dict[str, set[str]] = {}
    read_by_constant: set[str] = set()
    imports: set[str] = set()
    unreadable: list[tuple[str, str]] = []
    prefix = tree.package + "."
    own_variables = f"{tree.package.upper()}_"
    own_imports = [re.compile(rf"{word} {re.escape(prefix)}([\w.]+)") for word in ("from", "import")]
    for module, text in module_texts(tree, unreadable):
        text = "\n" + text
        for match in _CLASS.finditer(text):
            if not text[text.rfind("\n", 0, match.start()) : match.start()].strip():
                classes.setdefault(match[1], []).append(module)
        for pattern in _DEFINITIONS:
            for name in pattern.findall(text):
                definitions.setdefault(name, []).append(module)
        if "environ" in text or "getenv" in text:
            variables.update(name for names in _READ.findall(text) for name in names if name)
            read_by_constant.update(name for names in _READ_BY_CONSTANT.findall(text) for name in names if name)
        if own_variables in text:
            for name, value in _CONSTANT.findall(text):
                constants.setdefault(name, set()).add(value)
        if "GROUP" in text:
            groups.update(name for names in _GROUP.findall(text) for name in names if name.startswith(prefix))
        for pattern in own_imports:
            imports.update(prefix + name.rstrip(".") for name in pattern.findall(text))
    # The name of a variable can be a constant of another module than the one that reads the variable.
    variables |= {value for name in read_by_constant for value in constants.get(name, ())}
    table = SymbolIndex(tree).module(prefix + VARIABLES_MODULE)
    if table is not None:
        variables |= table.dictionaries.get(VARIABLES_TABLE, frozenset())
    return Survey(
        {name: tuple(where) for name, where in classes.items()},
        {name: tuple(dict.fromkeys(where)) for name, where in definitions.items()},
        frozenset(groups),
        frozenset(variables),
        frozenset(imports),
        tuple(unreadable),
    )
