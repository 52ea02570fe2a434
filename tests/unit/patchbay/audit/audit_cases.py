"""Reads the corpus of labelled cases. Each case is a small plugin with the findings that are expected in it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"

_EXPECT = re.compile(r"#\s*expect: (.*)$")

Label = tuple[str, str, int, bool]
"""Rule, file, line, and whether the finding is a note."""


@dataclass
class Case:
    name: str
    trees: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    expected: Counter[Label] = field(default_factory=Counter)

    def write(self, folder: Path) -> None:
        (folder / "plug").mkdir(parents=True)
        (folder / "plug" / "__init__.py").write_text("")
        for name, text in self.files.items():
            (folder / name).write_text(text)


def read_cases() -> list[Case]:
    return [case for path in sorted(FOLDER.iterdir()) if path.suffix in (".py", ".txt") for case in _read(path)]


def _read(path: Path) -> list[Case]:
    cases: list[Case] = []
    file = ""
    for line in path.read_text().splitlines():
        if line.startswith("#: case "):
            name, _, trees = line.removeprefix("#: case ").partition(" | ")
            cases.append(Case(f"{path.stem}: {name}", tuple(trees.split()) or ("installed",)))
            file = "plug/case.py"
        elif line.startswith("#: file "):
            name = line.removeprefix("#: file ").strip()
            file = name if name in ("pyproject.toml", "setup.py", "setup.cfg") else f"plug/{name}"
        elif line.startswith("#: expect "):
            where, rule = line.removeprefix("#: expect ").split()
            cases[-1].expected[rule, where.split(":")[0], int(where.split(":")[1]), False] += 1
        elif cases:
            text = cases[-1].files.get(file, "") + line + "\n"
            cases[-1].files[file] = text
            label = _EXPECT.search(line)
            if label:
                for word in label[1].split(","):
                    rule, _, note = word.strip().partition(" ")
                    cases[-1].expected[rule, file, text.count("\n"), note == "note"] += 1
    return cases
