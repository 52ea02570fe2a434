"""Checks options of `vllm serve` against a table of the installed release: names, numbers, choices and JSON.

`scripts/record_vllm_options.py` writes the tables from the parser of each release. An argparse parser is built from the
table, so that values, abbreviations and negative numbers are read as by vLLM's own parser. A release without a table is
not checked.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from vllm_backplane.early_checks.normalized import normalized
from vllm_backplane.errors import UsageError, nearest, short_repr

HINTS = {"--task": "; choose the kind of model with --runner and --convert instead."}
"""What replaces an option of former releases."""

_SIZE = re.compile(r"\s*\d+(\.\d+)?[kKmMgGtT]\s*")
_BINARY_FRACTION = re.compile(r"\s*\d+\.\d+[KMGT]\s*")
_SIZE_IN_JSON = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_SHOWN = 12
"""Names in a message."""
_LIKENESS, _LONGEST = 0.7, 100
"""How alike a misspelt option and the right one are at least. Of a longer text only the beginning is compared."""


def data_file(series: tuple[int, ...]) -> Path:
    """Returns the path of the table of a release, whether it exists or not."""
    return Path(__file__).with_name(f"vllm-options-{'.'.join(map(str, series))}.json")


@dataclass(frozen=True, slots=True)
class VllmOption:
    """Describes an option of `vllm serve`."""

    names: tuple[str, ...]
    values: int | str | None = None
    """The number of values as in argparse (`nargs`); 0 for a switch."""
    kind: str = "text"
    """What a value is: "text", "int", "float", "size" (with a suffix such as k), "json", "config" (a JSON object with
    known keys) or "text or json"; with "optional" in front, None and an empty text are values too."""
    choices: tuple[Any, ...] = ()
    keys: tuple[str, ...] = ()
    """The keys of a JSON object; empty if any key is allowed."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> VllmOption:
        fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in entry.items()}
        return cls(**fields)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dest(self) -> str:
        long = next((name for name in self.names if name.startswith("--")), self.names[0])
        return _dest(long)

    def check(self, text: str) -> str:
        """Returns the text of a value; raises argparse.ArgumentTypeError if vLLM would not accept it."""
        kind = self.kind.removeprefix("optional ")
        if text in ("", "None") and (kind != self.kind or None in self.choices):
            return text
        value = _KINDS[kind](text)
        if self.choices and value not in self.choices:
            raise _refusal(self._about_choices(text))
        if isinstance(value, (int, float)):
            self._check_bounds(text, value)
        if kind == "config":
            self._check_keys(value)
        return text

    def _about_choices(self, text: str) -> str:
        known = [str(choice) for choice in self.choices if choice is not None]
        return f"{short_repr(text)} is not one of its values{nearest(text, known)} They are: {_some(known)}"

    def _check_bounds(self, text: str, value: float) -> None:
        for bound, fails, words in (
            (self.least, lambda bound: value < bound, "at least"),
            (self.above, lambda bound: value <= bound, "more than"),
            (self.most, lambda bound: value > bound, "at most"),
            (self.below, lambda bound: value >= bound, "less than"),
        ):
            if bound is not None and fails(bound):
                raise _refusal(f"{text} is out of its range; give a number that is {words} {bound:g}")

    def _check_keys(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise _refusal(f"""{short_repr(value)} is not a JSON object; write for example {{"{self._example}": …}}""")
        for key in value:
            if self.keys and key not in self.keys:
                match = nearest(key, self.keys)
                raise _refusal(
                    f"unknown key {short_repr(key)}{match if match != '.' else f'; known: {_some(self.keys)}'}"
                )

    @property
    def _example(self) -> str:
        return self.keys[0] if self.keys else "key"


def _some(known: Sequence[str]) -> str:
    return ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _refusal(message: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(message)


# --- kinds of values


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _refusal(f"{short_repr(text)} is not a whole number") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _refusal(f"{short_repr(text)} is not a number") from None


def _size(text: str) -> int | None:
    if _BINARY_FRACTION.fullmatch(text):
        raise _refusal(f"{short_repr(text)} has a fraction and a binary suffix; write {text.strip().lower()}")
    if _SIZE.fullmatch(text):
        return None  # bounds concern plain numbers
    try:
        return int(text)
    except ValueError:
        raise _refusal(f"{short_repr(text)} is not a whole number such as 4096, 4k or 4K") from None


def _size_or_auto(text: str) -> int | str | None:
    return "auto" if text.strip().lower() in ("-1", "auto") else _size(text)


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except RecursionError:
        raise _refusal("is JSON that is nested too deeply") from None
    except ValueError as fault:
        raise _refusal(_about_json(text, fault)) from None


def _about_json(text: str, fault: ValueError) -> str:
    place = f" at line {fault.lineno}, column {fault.colno}" if isinstance(fault, json.JSONDecodeError) else ""
    reason = getattr(fault, "msg", str(fault))
    quotes = "" if '"' in text else """; JSON has double quotes, which a shell keeps within single ones: '{"key": 1}'"""
    return f"{short_repr(text)} is not JSON: {reason[:1].lower()}{reason[1:]}{place}{quotes}"


def _config(text: str) -> Any:
    """Parses JSON in which numbers may have a suffix."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    parts[::2] = [_SIZE_IN_JSON.sub("1", part) for part in parts[::2]]
    try:
        return json.loads("".join(parts), strict=False)
    except (RecursionError, ValueError):
        return _json(text)  # raises, with the position in the text as it was given


def _text_or_json(text: str) -> Any:
    return _json(text) if re.fullmatch(r"(?s)\s*{.*}\s*", text) else text


_KINDS: Mapping[str, Callable[[str], Any]] = {
    "text": str,
    "int": _int,
    "float": _float,
    "size": _size,
    "size or auto": _size_or_auto,
    "json": _json,
    "config": _config,
    "text or json": _text_or_json,
}


# --- the parser


class _Switch(argparse.Action):
    """Stores whether an option was given in a form that turns it on."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, _values: Any, name: str | None = None) -> None:
        setattr(namespace, self.dest, not str(name).startswith("--no-"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises a UsageError with argparse's message in shorter words."""
        found = re.fullmatch(r"(?s)argument ([^\s/:]+)\S*: (.*)", message)
        name, what = found.groups() if found else ("", message)
        what = re.sub(r"^expected one argument$", "a value is missing after it", what)
        what = re.sub(r"^expected at least one argument$", "one value or more are missing after it", what)
        what = re.sub(r"^ignored explicit argument (.*)$", r"it takes no value, and \1 was given", what)
        raise UsageError(f"{name}: {what}" if name else what)


@dataclass(frozen=True, slots=True)
class Given:
    """Holds the options of vLLM that were given on the command line or in a configuration file, by their long names."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Returns the text of an option, or True or False for a switch; None if it was not given."""
        return self.values.get(_dest(name))

    def without(self, *names: str) -> dict[str, Any]:
        """Returns the values of all options but these."""
        left_out = set(map(_dest, names))
        return {dest: value for dest, value in self.values.items() if dest not in left_out}


class VllmOptions:
    """Checks command lines of `vllm serve` of one release."""

    def __init__(
        self, options: Sequence[VllmOption], own_names: Sequence[str] = (), *, may_have_more: bool = False
    ) -> None:
        """Takes options of vLLM, and those of vllm-backplane itself, which an unknown option may have been meant for.

        `may_have_more` is for a vLLM that plugins have extended: it may have other options and values too.
        """
        self.names = {name for option in options for name in option.names}
        self._own_names = own_names
        self._may_have_more = may_have_more
        if may_have_more:
            options = [replace(option, choices=(), keys=()) for option in options]
        self._parser = _Parser(add_help=False, prefix_chars="-")
        for option in options:
            if option.values == 0:
                self._parser.add_argument(*option.names, dest=option.dest, nargs=0, action=_Switch)
            else:
                self._parser.add_argument(*option.names, dest=option.dest, nargs=option.values, type=option.check)

    @classmethod
    def of_release(
        cls, series: tuple[int, ...], own_names: Sequence[str] = (), *, may_have_more: bool = False
    ) -> VllmOptions | None:
        """Returns the options of a release, or None if there is no table for it."""
        file = data_file(series)
        if not file.is_file():
            return None
        options = [VllmOption.from_json(entry) for entry in json.loads(file.read_text())]
        return cls(options, own_names, may_have_more=may_have_more)

    def check(self, arguments: Sequence[str]) -> Given:
        """Returns the options in arguments that follow the model; raises UsageError for what vLLM would not accept."""
        if not self._may_have_more:
            for argument in arguments:
                self._refuse_doubt(argument)
        found, unknown = self._parser.parse_known_args(normalized(arguments))
        if unknown and not self._may_have_more:
            raise UsageError(self._about_unknown(unknown[0]))
        return Given({name: value for name, value in vars(found).items() if value is not None})

    def _refuse_doubt(self, argument: str) -> None:
        """Refuses an abbreviation that stands for an option of vllm-backplane as well as for one of vLLM."""
        name = argument.partition("=")[0]
        if len(name) < 3 or name in self.names or not name.startswith("--"):
            return
        ours = [own for own in self._own_names if own.startswith(name)]
        theirs = [known for known in self.names if known.startswith(name) and known not in ours]
        if ours and theirs:
            others = f"; vLLM has {' and '.join(sorted(theirs))}" if len(theirs) < 4 else ""
            raise UsageError(f"unknown option {name}; did you mean {' or '.join(ours)}?{others}")

    def _about_unknown(self, argument: str) -> str:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {short_repr(argument)}; one model is served, and it comes first"
        if name in HINTS:
            return f"unknown option {name}{HINTS[name]}"
        known = [*self._own_names, *sorted(self.names)] if name.startswith("--") else []
        match = difflib.get_close_matches(name[:_LONGEST], known, 1, _LIKENESS)
        remedy = f"did you mean {match[0]}?" if match else "'vllm serve --help=all' lists the options of vLLM"
        return f"unknown option {short_repr(name)[1:-1]}; {remedy}"
