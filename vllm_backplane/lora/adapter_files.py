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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_backplane.errors import short_repr

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CONFIG_BYTES = 1 << 20
"""Size limit of adapter_config.json. Published ones have some kilobytes."""
_MODULE_PATTERN = re.compile(r"(?:[\w\-^$|]|\\?\.|\\d|\.\*){1,200}")
"""Matches the patterns of module names that are accepted: names, dots, digits, alternatives, anchors and `.*`. vLLM
searches with the pattern, and nested repetitions could take it years."""


class UnusableFiles(ValueError):
    """Reports why the files of an adapter cannot be loaded."""


def require_loadable(path: str, max_rank: int) -> None:
    """Raises `UnusableFiles` if vLLM could not load the adapter in the folder `path`, or would wait for its files.

    A folder that does not exist is left to vLLM, which reports it, or downloads the adapter of that name.
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
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise UnusableFiles(f"lora_alpha in {CONFIG} is {short_repr(alpha)}, not a number")
    for name in ("rank_pattern", "alpha_pattern"):
        _require_sound_pattern(name, config.get(name) or {})
    for module, rank in (config.get("rank_pattern") or {}).items():
        if type(rank) is not int or not 0 < rank <= max_rank:
            raise UnusableFiles(
                f"rank_pattern in {CONFIG} has the rank {short_repr(rank)} for {short_repr(module)}, and ranks from 1 "
                f"to {max_rank} are served (--max-lora-rank)"
            )


def _require_sound_pattern(name: str, pattern: Any) -> None:
    if not isinstance(pattern, Mapping):
        raise UnusableFiles(f"{name} in {CONFIG} has no object but {short_repr(pattern)}")
    for module in pattern:
        if not _MODULE_PATTERN.fullmatch(module):
            raise UnusableFiles(f"{name} in {CONFIG} has {short_repr(module)}, which is not a pattern of module names")
