"""Reads the YAML file of `--config` into arguments, as vLLM does, and finds what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_backplane.errors import UsageError, short_repr

OPTION = "--config"


def split_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Returns the configuration file that arguments name, and the other arguments. vLLM accepts one such file."""
    if OPTION not in arguments:
        return None, list(arguments)
    if list(arguments).count(OPTION) > 1:
        raise UsageError(f"{OPTION} is given twice; put everything into one file")
    place = list(arguments).index(OPTION)
    if place + 1 == len(arguments):
        raise UsageError(f"{OPTION}: the path of a YAML file is missing after it")
    return Path(arguments[place + 1]), [*arguments[:place], *arguments[place + 2 :]]


def arguments_of(file: Path, known: Collection[str]) -> list[str]:
    """Returns the arguments that a configuration file stands for. `known` are the names of vLLM's options."""
    return [argument for key, value in _content(file).items() for argument in _arguments(str(key), value, known)]


def _arguments(key: str, value: Any, known: Collection[str]) -> Iterator[str]:
    if value is False:
        off = f"--no-{key}"
        if off in known:
            yield off
    elif isinstance(value, list):
        yield from [f"--{key}", *map(str, value)] if value else []
    else:
        yield f"--{key}"
        if isinstance(value, dict):
            yield json.dumps(value, default=str)
        elif value is not True:
            yield str(value)


def _content(file: Path) -> dict[Any, Any]:
    import yaml

    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{OPTION} is {short_repr(str(file))}; give the path of a YAML file (.yaml or .yml)")
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as fault:
        raise UsageError(f"{OPTION} {file} cannot be read: {fault.strerror}; correct the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"{OPTION} {file} is not a text in UTF-8; give a YAML file") from None
    except yaml.YAMLError as fault:
        mark, problem = getattr(fault, "problem_mark", None), getattr(fault, "problem", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise UsageError(f"{OPTION} {file}{place}: this is not YAML: {problem or 'it cannot be parsed'}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{OPTION} {file} has no options; write one per line, such as 'max-model-len: 2048'")
    return content
