"""Validates options and environment variables, and reports every invalid one instead of only the first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_backplane.doctor.findings import Finding, error
from vllm_backplane.errors import OptionError
from vllm_backplane.own_options import misplaced_option
from vllm_backplane.settings.options import OTHER_VARIABLES, PREFIX, SECTION, Scopes, Setting, resolve


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """Describes one option with its value, or an environment variable that is not an option (then `path` is empty)."""

    path: str
    variable: str
    value: Any
    source: str
    help: str


def parse_additional_config(text: str | None) -> tuple[dict[str, Any], list[Finding]]:
    """Parses the value of vLLM's --additional-config."""
    if text is None:
        return {}, []
    remedy = """give an object, such as --additional-config '{"backplane": {"memory_share": 0.5}}'"""
    try:
        config = json.loads(text)
    except ValueError as fault:
        return {}, [error(f"--additional-config is not JSON: {fault}", remedy)]
    if not isinstance(config, dict):
        return {}, [error(f"--additional-config is not a JSON object: {text}", remedy)]
    from vllm_backplane.device import discover  # imports torch

    wrong = misplaced_option(config, discover())
    return config, [] if wrong is None else [error(wrong, remedy)]


@dataclass(frozen=True, slots=True)
class ValidOptions:
    """Holds the valid options. An invalid option becomes a finding and counts as not given."""

    settings: Mapping[str, Mapping[str, Setting]]
    given: Mapping[str, Any]
    variables: Mapping[str, str]
    findings: tuple[Finding, ...]


def validate(scopes: Scopes, given: Any, environment: Mapping[str, str]) -> ValidOptions:
    """Validates each option of `given` (the section of --additional-config) and of the environment by itself."""
    findings: list[Finding] = []
    variables: dict[str, str] = {}
    for variable, value in environment.items():
        if variable.startswith(PREFIX):
            fault = _fault(scopes, {}, {variable: value})
            if fault is None:
                variables[variable] = value
            else:
                findings.append(error(fault, f"correct or unset {variable}"))
    valid: dict[str, Any] = {}
    for path, part in _parts(scopes, given):
        fault = _fault(scopes, part, {})
        if fault is None:
            _merge(valid, part)
        else:
            findings.append(error(fault, f"correct or remove {path} in --additional-config"))
    fault = _fault(scopes, valid, variables)
    if fault is not None:  # each option is valid, and two of them contradict each other
        findings.append(error(fault, "keep one of the two"))
        valid = {}
    return ValidOptions(resolve(scopes, valid, variables), valid, variables, tuple(findings))


def _fault(scopes: Scopes, given: Any, environment: Mapping[str, str]) -> str | None:
    try:
        resolve(scopes, given, environment)
    except OptionError as fault:
        return str(fault)
    return None


def _parts(scopes: Scopes, given: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path of each option, and a section with only that option."""
    if not isinstance(given, Mapping):
        yield SECTION, given
        return
    for key, value in given.items():
        if key in scopes and isinstance(value, Mapping):
            for inner, inner_value in value.items():
                yield f"{SECTION}.{key}.{inner}", {key: {inner: inner_value}}
        else:
            yield f"{SECTION}.{key}", {key: value}


def _merge(into: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            into[key].update(value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def describe(settings: Mapping[str, Mapping[str, Setting]], environment: Mapping[str, str]) -> list[OptionInfo]:
    """Returns every option and variable that a user can set, with its current value."""
    options = [
        OptionInfo(
            setting.path,
            setting.option.variable(scope),
            list(setting.value) if isinstance(setting.value, tuple) else setting.value,
            setting.source,
            setting.option.help,
        )
        for scope, by_key in settings.items()
        for setting in by_key.values()
    ]
    others = [
        OptionInfo("", name, environment.get(name), name if name in environment else "default", meaning)
        for name, meaning in OTHER_VARIABLES.items()
    ]
    return options + others
