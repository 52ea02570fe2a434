"""Checks that the weights of a local model fit into the memory of the machine, from the headers of its files.

Only what is certain is refused: weights that take more than all memory, on a device that uses the memory of the host.
`worker/worker.py` compares the same weights with the memory that is free, when the engine starts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_backplane.devices import ON_HOST_MEMORY
from vllm_backplane.early_checks.model import OWN_FORMATS, loaded_files
from vllm_backplane.early_checks.vllm_options import Given
from vllm_backplane.errors import BackplaneError, UsageError
from vllm_backplane.host.control_groups import control_group_limits

GIB = 1 << 30
CAST = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes in files that are cast to the dtype of the model, with their bytes."""
ELSEWHERE = (
    *("--nnodes", "--node-rank", "--headless", "--data-parallel-address", "--data-parallel-backend"),
    *("--cpu-offload-gb", "--data-parallel-hybrid-lb", "--data-parallel-external-lb", "--data-parallel-size-local"),
    *("--hf-overrides", "--language-model-only", "--limit-mm-per-prompt", "--mm-encoder-only"),
)
"""Options with which some of the weights may be on another host or elsewhere, or are not loaded."""
_SMALLEST_FACTOR = 8
"""Weights in memory take at most that many times the bytes of their files: no factor of two casts exceeds it."""
_MOST_HEADER = 100 << 20


def check_fits(model: Path, options: Given, device: str | None, installed: Collection[str]) -> None:
    """Raises UsageError if the weights of a folder or GGUF file take more than all memory of this machine.

    `device` is the requested one, or None; then one of the `installed` devices is chosen later.
    """
    if not ({device} if device else set(installed)) <= ON_HOST_MEMORY or any(map(options.get, ELSEWHERE)):
        return
    if options.get("--distributed-executor-backend") == "ray":
        return
    if options.get("--load-format") not in (None, *OWN_FORMATS):
        return
    total, of_what = _total_memory()
    try:
        files = _files(model, options)
        if sum(file.stat().st_size for file in files) * _SMALLEST_FACTOR <= total:
            return
        needed = _bytes(files, options)
    except (BackplaneError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # a damaged file is reported with more detail when it is loaded
    if needed > total:
        raise UsageError(
            f"the weights of {model} take at least {needed / GIB:.1f} GiB, and {of_what} {total / GIB:.1f} GiB; choose "
            "a smaller model, or weights with fewer bits"
        )


def _total_memory() -> tuple[int, str]:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = min((limit for limit, _ in control_group_limits()), default=machine)
    return (machine, "this machine has") if machine <= group else (group, "a control group limits memory to")


def _files(model: Path, options: Given) -> list[Path]:
    if model.is_file():
        return _parts(model)
    found = [file for file in loaded_files(model, options) if file.suffix == ".safetensors"]
    return found or [file for first in sorted(model.glob("*.gguf"))[:1] for file in _parts(first)]


def _parts(file: Path) -> list[Path]:
    """Returns all parts of a GGUF file that was split."""
    stem, of, count = file.stem.rpartition("-of-")
    return sorted(file.parent.glob(f"{stem[:-5]}?????-of-{count}.gguf")) if of else [file]


def _bytes(files: Sequence[Path], options: Given) -> float:
    if all(file.suffix == ".gguf" for file in files):
        return sum(map(_gguf_bytes, files))
    per_weight = {None: 2.0, "auto": 2.0, "float32": 4.0, "float": 4.0}.get(options.get("--dtype"), 2.0)
    if options.get("--quantization") or options.get("--quantization-config"):
        per_weight = 0.5
    tensors = {name: tensor for file in files for name, tensor in _safetensors(file)}  # copies count once
    return sum(
        math.prod(tensor["shape"]) * per_weight
        if tensor["dtype"] in CAST
        else tensor["data_offsets"][1] - tensor["data_offsets"][0]
        for tensor in tensors.values()
    )


def _safetensors(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _MOST_HEADER:
            return
        header = json.loads(opened.read(size))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, tensor


def _gguf_bytes(file: Path) -> float:
    """Returns the least bytes of the weights in memory. The embedding may stay in the mapped file, and floats may be
    cast to two bytes."""
    from vllm_backplane.gguf.file import GgufFile

    found = GgufFile(file)
    return sum(
        math.prod(tensor.shape) * 2 if tensor.type.name in CAST else tensor.size * 0.95
        for name, tensor in found.tensors.items()
        if name != "token_embd.weight"
    )
