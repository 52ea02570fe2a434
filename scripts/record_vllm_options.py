"""Records the options of `vllm serve` in every supported release, for the checks before vLLM is imported.

    python scripts/record_vllm_options.py [VERSION …]

The published source of each release builds its own parser, in a process of this environment. One option per line is
written to vllm_backplane/early_checks/vllm-options-SERIES.json. A test compares the file of the installed release.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "patchbay")]

BOUNDS = {"ge": "least", "gt": "above", "le": "most", "lt": "below"}
"""Names of bounds in the metadata of pydantic's fields, and in the file."""
CONDITIONAL = ("LoRAConfig", "MultiModalConfig")
"""Configurations that vLLM makes for some models and command lines only. For the others it checks no bounds."""


def described() -> list[dict[str, Any]]:
    """Returns the options of the parser that the imported vLLM builds, in its order."""
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    subparsers = FlexibleArgumentParser(prog="vllm").add_subparsers(dest="subparser")
    (command,) = serve.cmd_init()
    parser = command.subparser_init(subparsers)
    return [dict(_description(parser, action)) for action in parser._actions if action.option_strings]


def _description(parser: Any, action: Any) -> Iterator[tuple[str, Any]]:
    yield "names", [name for name, registered in parser._option_string_actions.items() if registered is action]
    if action.nargs is not None:
        yield "values", action.nargs
    if action.nargs == 0:
        return
    kind, config = _kind(action.type)
    if kind not in ("text", ""):
        yield "kind", kind
    if action.choices is not None and kind:
        yield "choices", list(action.choices)
    if config is not None and not _accepts_any_key(config):
        yield "keys", sorted(_keys(config))
    if "int" in kind or "float" in kind or "size" in kind:
        yield from _bounds(parser, action)


def _kind(convert: Callable[[str], Any] | None) -> tuple[str, type | None]:
    """Returns the word for a conversion of argparse, and the class of a configuration that is given as JSON.

    The word is empty for a conversion that only vLLM knows.
    """
    from vllm.engine import arg_utils
    from vllm.utils import argparse_utils

    known = {
        None: "text",
        str: "text",
        int: "int",
        float: "float",
        json.loads: "json",
        arg_utils.union_dict_and_str: "text or json",
        argparse_utils.human_readable_int: "size",
    }
    if hasattr(argparse_utils, "human_readable_int_or_auto"):
        known[argparse_utils.human_readable_int_or_auto] = "size or auto"
    if convert in known:
        return known[convert], None
    name = getattr(convert, "__qualname__", "")
    if name.startswith(("parse_type.", "optional_type.")):
        kind, config = _kind(convert.__closure__[0].cell_contents)  # type: ignore[union-attr]
        optional = "optional " * (name.startswith("optional_type.") and kind != "")
        return (optional + kind).replace("optional text", "text"), config
    if name.endswith(".parse_dataclass"):
        return "config", convert.__defaults__[0]  # type: ignore[union-attr]
    return "", None


def _accepts_any_key(config: type) -> bool:
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(config).validate_json('{"no_such_key": 1}')
    except ValidationError as fault:
        return all(error["type"] != "unexpected_keyword_argument" for error in fault.errors())
    return True


def _keys(config: Any) -> set[str]:
    found = set()
    for field in dataclasses.fields(config):
        if field.init:
            declared = config.__pydantic_fields__.get(field.name)
            aliases = [getattr(declared, name, None) for name in ("alias", "validation_alias")]
            aliases += [choice for alias in aliases for choice in getattr(alias, "choices", ())]
            found |= {field.name, *(alias for alias in aliases if isinstance(alias, str))}
    return found


def _bounds(parser: Any, action: Any) -> Iterator[tuple[str, Any]]:
    """Yields the bounds of the field that has the option's name, in the configuration class that its group names."""
    import vllm.config

    for group in parser._action_groups:
        if action in group._group_actions and group.title not in CONDITIONAL and group is not parser._optionals:
            fields = getattr(getattr(vllm.config, group.title or "", None), "__pydantic_fields__", {})
            field = fields.get(action.dest)
            for entry in getattr(field, "metadata", ()):
                for name, word in BOUNDS.items():
                    if isinstance(getattr(entry, name, None), (int, float)):
                        yield word, getattr(entry, name)


def write(version: str, options: Sequence[dict[str, Any]]) -> Path:
    from vllm_backplane.early_checks.vllm_options import data_file

    path = data_file(tuple(map(int, version.split(".")[:2])))
    lines = ",\n".join(json.dumps(option) for option in options)
    path.write_text(f"[\n{lines}\n]\n")
    return path


def _described_by(version: str) -> list[dict[str, Any]]:
    """Returns the options of a release, from a process that imports it."""
    from packaging.version import Version

    from vllm_patchbay.upstream import installed_version
    from vllm_patchbay.upstream.fetch import source_archive

    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "VLLM_PLUGINS": "backplane", "BACKPLANE_DEVICE": "cpu"}
        if installed_version().public != version:
            archive = zipfile.ZipFile(source_archive(Version(version)))
            archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
            variables["PYTHONPATH"] = folder
        result = Path(folder, "options.json")
        subprocess.run([sys.executable, __file__, "--describe", str(result)], env=variables, check=True, cwd=folder)
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--describe"]:
        Path(arguments[1]).write_text(json.dumps(described()))
        return
    from vllm_backplane.settings.releases import RELEASES

    for version in arguments or [release.version for release in RELEASES]:
        print(write(version, _described_by(version)))


if __name__ == "__main__":
    main(sys.argv[1:])
