"""Checks the files of a LoRA adapter before vLLM reads them.

The path of an adapter comes from a request. A pipe in the place of a file would block the engine, and with it every
other request. A file of another kind, or a value of another type in adapter_config.json, would end in an error of vLLM
that names no reason.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_backplane.errors import short_repr
from vllm_backplane.name_patterns import UnboundedPattern, ways

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CONFIG_BYTES = 1 << 20
"""Size limit of adapter_config.json. Published ones have some kilobytes."""
_PATTERNS = 500
"""Limit of all patterns of module names. vLLM compiles a pattern again for every module if there are more than Python's
cache of patterns holds."""
_WAYS = 1e8
"""Limit of the ways in which all patterns can match all modules of an adapter (name_patterns.py): some seconds."""
_HEADER_BYTES = 16 << 20
"""Size limit of the list of tensors in an adapter with patterns."""


class UnusableFiles(ValueError):
    """Reports why the files of an adapter cannot be loaded."""


def require_loadable(path: str, max_rank: int) -> None:
    """Raises `UnusableFiles` if vLLM could not load the adapter in the folder `path`, or would wait for its files.

    `path` is what vLLM has resolved: for an adapter from the hub, the folder of its download. A folder that does not
    exist is left to vLLM, which reports it.
    """
    folder = os.path.expanduser(path)
    kind = _kind(folder)
    if kind is None:
        return
    if not stat.S_ISDIR(kind):
        raise UnusableFiles(f"{short_repr(folder)} is not a folder; give the folder of the adapter")
    for name in (CONFIG, *WEIGHTS):
        kind = _kind(os.path.join(folder, name))
        if kind is not None and not stat.S_ISREG(kind):
            raise UnusableFiles(f"{name} is not a regular file")
    _require_sound_config(Path(folder, CONFIG), max_rank)


def _kind(path: str) -> int | None:
    """Returns the mode of a file, or None if it does not exist."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:  # a path that is too long, or contains a null character
        reason = getattr(fault, "strerror", None) or str(fault)
        raise UnusableFiles(f"{short_repr(path)} cannot be opened: {reason}") from None


def _require_sound_config(file: Path, max_rank: int) -> None:
    try:
        with file.open("rb") as opened:
            text = opened.read(_CONFIG_BYTES + 1)
    except FileNotFoundError:
        return  # vLLM reports it
    except OSError as fault:
        raise UnusableFiles(f"{CONFIG} cannot be read: {fault.strerror}") from None
    if len(text) > _CONFIG_BYTES:
        raise UnusableFiles(f"{CONFIG} has more than {_CONFIG_BYTES} bytes")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise UnusableFiles(f"{CONFIG} is not JSON: {fault}") from None
    if not isinstance(config, dict):
        raise UnusableFiles(f"{CONFIG} has no object but {short_repr(config)}")
    rank, alpha = config.get("r", 1), config.get("lora_alpha", 1)
    if type(rank) is not int or rank <= 0:
        raise UnusableFiles(f"r in {CONFIG} is {short_repr(rank)}, not a positive integer")
    if not _is_number(alpha):
        raise UnusableFiles(f"lora_alpha in {CONFIG} is {short_repr(alpha)}, not a number")
    modules = config.get("modules_to_save")
    if modules is not None and not (isinstance(modules, list) and all(isinstance(one, str) for one in modules)):
        raise UnusableFiles(f"modules_to_save in {CONFIG} is {short_repr(modules)}, not a list of names")
    patterns = [pattern for name in ("rank_pattern", "alpha_pattern") for pattern in _patterns(config, name)]
    if patterns:
        _require_bounded_patterns(patterns, file.parent)
    for module, rank in (config.get("rank_pattern") or {}).items():
        if type(rank) is not int or not 0 < rank <= max_rank:
            raise UnusableFiles(
                f"rank_pattern in {CONFIG} has the rank {short_repr(rank)} for {short_repr(module)}, and ranks from 1 "
                f"to {max_rank} are served (--max-lora-rank)"
            )
    for module, alpha in (config.get("alpha_pattern") or {}).items():
        if not _is_number(alpha):
            raise UnusableFiles(
                f"alpha_pattern in {CONFIG} has {short_repr(alpha)} for {short_repr(module)}, not a number"
            )


def _is_number(value: Any) -> bool:
    """Returns whether a value is a finite number that a float can hold."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def _patterns(config: Mapping[str, Any], name: str) -> list[str]:
    """Returns the patterns of module names in a part of the config."""
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise UnusableFiles(f"{name} in {CONFIG} has no object but {short_repr(found)}")
    return list(found)


def _require_bounded_patterns(patterns: Sequence[str], folder: Path) -> None:
    """Raises if vLLM, which matches every pattern with the name of every module, could take minutes for that."""
    if len(patterns) > _PATTERNS:
        raise UnusableFiles(f"{CONFIG} has {len(patterns)} patterns of module names, more than {_PATTERNS}")
    names = _module_names(folder)
    longest = max(map(len, names), default=1)
    dots = max((name.count(".") for name in names), default=0)
    total = 0.0
    for pattern in patterns:
        try:
            # vLLM's own expression around a pattern lets it begin after every dot of the name.
            total += ways(pattern, longest) * (dots + 1) * len(names)
        except UnboundedPattern as fault:
            raise UnusableFiles(
                f"{CONFIG} has {short_repr(pattern)}, which is not a pattern of module names that is served: {fault}; "
                "write the names of the modules out"
            ) from None
        if total > _WAYS:
            raise UnusableFiles(
                f"the patterns of module names in {CONFIG}, up to {short_repr(pattern)}, may take very long to match; "
                "write the names of the modules out"
            )


def _module_names(folder: Path) -> set[str]:
    """Returns the names of the modules in an adapter's safetensors file, from its header; none if it has no weights.

    The weights of an adapter with patterns must be in this format, because others cannot be listed before they load.
    """
    present = [name for name in WEIGHTS if (folder / name).exists()]
    if not present:
        return set()  # vLLM reports it
    try:
        with (folder / WEIGHTS[0]).open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= _HEADER_BYTES else None
    except (OSError, ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise UnusableFiles(f"patterns in {CONFIG} require a readable {WEIGHTS[0]}, of at most 16 MiB of names")
    return {re.sub(r"\.lora_[AB](\..*)?$", "", name) for name in header}
