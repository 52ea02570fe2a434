"""Rewrites a command line of `vllm serve` as vLLM's parser does before it hands it to argparse.

An option may have underscores for hyphens, a key of a JSON object may be given as `--option.key value`, several of them
one after another, and `-O3` is short for `--optimization-level 3`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_backplane.errors import UsageError

_LEVELS = (["0"], ["1"], ["2"], ["3"])


def normalized(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with hyphens, and with one JSON object for all keys of an option, at the end."""
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(list(_spelled(list(arguments))))
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not name.startswith("-") or "." not in name:
            plain.append(argument)
            continue
        if not equals:
            following = next(rest, None)
            if following is None:
                raise UsageError(f"{name}: a value is missing after it")
            value = following
        option, *keys = name.removesuffix("+").split(".")
        content: Any = value.split(",") if name.endswith("+") else _value(value)
        for key in reversed(keys):
            content = {key: content}
        _merge(objects.setdefault(option, {}), content)
    for option, content in objects.items():
        plain += [option, json.dumps(content)]
    return plain


def _spelled(arguments: list[str]) -> Iterator[str]:
    for place, argument in enumerate(arguments, 1):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            before, dot, after = name.partition(".")
            yield before.replace("_", "-") + dot + after + equals + value
        elif argument.startswith("-O") and argument != "-O":
            yield "--optimization-level"
            yield argument[2:].removeprefix("=")
        elif argument == "-O" and arguments[place : place + 1] in _LEVELS:
            yield "--optimization-level"
        else:
            yield argument


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return 1 if re.fullmatch(r"\s*\d+(\.\d+)?[kKmMgGtT]\s*", text) else text


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        known = into.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            into[key] = known + value
        else:
            into[key] = value
