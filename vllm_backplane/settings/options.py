"""Declares, parses and resolves the options of Backplane and of its devices.

An option ``threads`` of the device ``cpu`` is the key ``{"backplane": {"cpu": {"threads": 2}}}`` of
vLLM's ``--additional-config`` and the variable ``BACKPLANE_CPU_THREADS``. The variable serves
processes that have no command line. If both are given and differ, that is an error, because
neither has an obvious precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm_backplane.errors import OptionError, nearest

T = TypeVar("T")

PREFIX = "BACKPLANE_"
"""Prefix of Backplane's environment variables."""
SECTION = "backplane"
"""Key of Backplane's section in --additional-config."""
DEVICE_GROUP = "vllm_backplane.devices"
"""Group of the entry points by which a distribution provides devices."""


@dataclass(frozen=True, slots=True)
class Option(Generic[T]):
    """Declares one option."""

    key: str
    default: T
    parse: Callable[[Any], T]
    """Parses the JSON value or the variable's text; raises ValueError with a description of the expected value."""
    help: str

    def variable(self, scope: str = "") -> str:
        """Returns the name of the option's environment variable; `scope` is the device, or "" for Backplane."""
        parts = (scope, self.key) if scope else (self.key,)
        return PREFIX + "_".join(part.upper().replace("-", "_") for part in parts)


# --- parsers, for Option.parse


def text(value: Any) -> str:
    """Parses a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string")
    return value


def boolean(value: Any) -> bool:
    """Parses true or false, also written as 1, yes, on or 0, no, off."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")


def integer(minimum: int, maximum: int | None = None) -> Callable[[Any], int]:
    """Returns a parser of whole numbers within the bounds."""
    expected = f"a whole number of at least {minimum}" + (f", at most {maximum}" if maximum else "")

    def parse(value: Any) -> int:
        if isinstance(value, (bool, float)):
            raise ValueError(expected)
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise ValueError(expected) from None
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(expected)
        return number

    return parse


def group_size(value: Any) -> int:
    """Parses the group size of quantized weights: a multiple of 8, or 0 for a whole row."""
    number = integer(0)(value)
    if number % 8:
        raise ValueError("a multiple of 8, or 0")
    return number


def fraction(value: Any) -> float:
    """Parses a number above 0 and at most 1."""
    expected = "a number above 0 and at most 1"
    if isinstance(value, bool):
        raise ValueError(expected)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    if not 0 < number <= 1:
        raise ValueError(expected)
    return number


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {unit + "I": 1 << 10 * power for power, unit in enumerate("KMGT", start=1)}


def byte_count(value: Any) -> int:
    """Parses a whole number of bytes, or a number with a unit: 512MiB, 2GiB, 1.5G."""
    expected = "a number of bytes, such as 1073741824 or 1GiB"
    if isinstance(value, bool):
        raise ValueError(expected)
    words = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(value).upper())
    if words is None or words[2] not in _UNITS:
        raise ValueError(expected)
    count = int(float(words[1]) * _UNITS[words[2]]) if "." in words[1] else int(words[1]) * _UNITS[words[2]]
    if count < 1:
        raise ValueError(expected)
    return count


def one_of(*choices: str) -> Callable[[Any], str]:
    """Returns a parser that accepts exactly one of the choices."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return str(value)

    return parse


def some_of(*choices: str) -> Callable[[Any], tuple[str, ...]]:
    """Returns a parser of a subset of the choices, kept in their order; 'off' is none of them, 'all' every one."""
    expected = f"off, all, or any of {', '.join(choices)}, separated by commas"

    def parse(value: Any) -> tuple[str, ...]:
        try:
            given = set(names(value))
        except ValueError:
            raise ValueError(expected) from None
        if not given or given in ({"off"}, {"all"}):
            return choices if given == {"all"} else ()
        if not given <= set(choices):
            raise ValueError(expected)
        return tuple(choice for choice in choices if choice in given)

    return parse


def names(value: Any) -> tuple[str, ...]:
    """Parses a list of strings, or one string with commas between the names."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) for i in items):
        raise ValueError("a list of names, or names separated by commas")
    return tuple(item.strip() for item in items if item.strip())


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds the resolved value of an option and the place it comes from."""

    scope: str
    option: Option[Any]
    value: Any
    source: str

    @property
    def path(self) -> str:
        """Returns the option's key with its scope, such as cpu.threads."""
        return f"{self.scope}.{self.option.key}" if self.scope else self.option.key


Scopes = Mapping[str, tuple[Option[Any], ...] | str]
"""Maps a device name, or "" for Backplane, to its options, or to the reason why its options are not known."""


def resolve(scopes: Scopes, given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, dict[str, Setting]]:
    """Returns the setting of every option of every scope; raises an OptionError at the first fault."""
    if not isinstance(given, Mapping):
        raise OptionError(f"the 'backplane' section of --additional-config must be an object, got {json.dumps(given)}")
    known_scopes = {scope: options for scope, options in scopes.items() if not isinstance(options, str)}
    own = {option.key for option in known_scopes.get("", ())}
    for key in given:
        if key not in own and key not in scopes:
            known = sorted(own | {scope for scope in scopes if scope})
            raise OptionError(
                f"unknown option {key!r} in the 'backplane' section of --additional-config"
                f"{nearest(str(key), known)} Known: {', '.join(known)}."
            )
    for scope, reason in scopes.items():
        if isinstance(reason, str):
            _refuse_unavailable(scope, reason, given, environment)
    variables: dict[str, str] = {}
    for scope, options in known_scopes.items():
        for option in options:
            variable, path = option.variable(scope), f"{scope}.{option.key}" if scope else option.key
            if variable in variables:
                raise OptionError(
                    f"options {variables[variable]!r} and {path!r} share the variable {variable}; rename one of them "
                    "in its device"
                )
            variables[variable] = path
    for variable in environment:
        if variable.startswith(PREFIX) and variable not in variables and variable not in OTHER_VARIABLES:
            known_variables = sorted([*variables, *OTHER_VARIABLES])
            raise OptionError(
                f"unknown variable {variable}{nearest(variable, known_variables)} Known: {', '.join(known_variables)}."
            )
    resolved: dict[str, dict[str, Setting]] = {}
    for scope, options in known_scopes.items():
        section = given.get(scope, {}) if scope else given
        if not isinstance(section, Mapping):
            raise OptionError(f"option {scope!r} must be an object with the options of that device")
        keys = {option.key for option in options}
        if scope:
            for key in section:
                if key not in keys:
                    raise OptionError(
                        f"unknown option {scope}.{key}{nearest(str(key), keys)} "
                        f"Known: {', '.join(sorted(keys)) or 'none'}."
                    )
        resolved[scope] = {o.key: _resolve_option(scope, o, section, environment) for o in options}
    return resolved


def _refuse_unavailable(scope: str, reason: str, given: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Raises an OptionError for an option of a device that cannot be imported; it must not look like a misspelling."""
    if scope in given:
        raise OptionError(f"option {scope!r} in the 'backplane' section of --additional-config: {reason}")
    for variable in environment:
        if variable.startswith(Option("", None, text, "").variable(scope)) and variable not in OTHER_VARIABLES:
            raise OptionError(f"{variable}: {reason}")


OTHER_VARIABLES: dict[str, str] = {
    "BACKPLANE_BUILD_KERNELS": "0 builds the package without its C++ kernels (read by setup.py only)",
    "BACKPLANE_CACHE": "folder for prepared models and for the configuration that vLLM reads of GGUF files; default: "
    "vllm-backplane in the user's cache folder for models, vllm-backplane-USER in the folder for temporary files for "
    "GGUF configurations. It must belong to you or root, and nobody else may write in it",
    "BACKPLANE_COMMAND": "set by 'vllm-backplane serve' for vLLM's processes: Backplane is their platform, also beside "
    "an accelerator that vLLM serves itself",
    "BACKPLANE_VISIBLE_CARDS": "which cards of a device to use, for devices without a variable of their own",
}
"""Environment variables that are not options, because they are read before or outside a running engine."""


def _resolve_option(
    scope: str, option: Option[Any], section: Mapping[str, Any], environment: Mapping[str, str]
) -> Setting:
    variable = option.variable(scope)
    path = f"{scope}.{option.key}" if scope else option.key
    found: list[tuple[str, Any]] = []
    if option.key in section:
        found.append((f"--additional-config backplane.{path}", section[option.key]))
    if environment.get(variable, "") != "":
        found.append((variable, environment[variable]))
    values = []
    for source, raw in found:
        try:
            values.append((source, option.parse(raw)))
        except ValueError as fault:
            raise OptionError(f"{source} is {raw!r}; expected {fault}. {option.help}") from None
    if len(values) == 2 and values[0][1] != values[1][1]:
        raise OptionError(f"{values[0][0]} is {values[0][1]!r} and {values[1][0]} is {values[1][1]!r}: remove one")
    if values:
        return Setting(scope, option, values[0][1], " and ".join(source for source, _ in values))
    return Setting(scope, option, option.default, "default")
