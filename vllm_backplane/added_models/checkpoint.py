"""Examines the files of a model: which of them serving needs, whether they are complete, and what they contain.

Only headers and configuration files are read: those of GGUF with `gguf/`, those of safetensors with its library. Files
that unpickle when they are loaded are never taken.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_backplane.added_models.entries import Format
from vllm_backplane.added_models.files import names_in, serving_files
from vllm_backplane.errors import CheckpointError, UsageError, nearest, short_repr
from vllm_backplane.gguf.architectures import checkpoint_tensors
from vllm_backplane.gguf.file import is_gguf
from vllm_backplane.gguf.hf_config import configuration
from vllm_backplane.gguf.model_files import GgufModel, open_model

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SERVED_TYPES = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "F32", "F16", "BF16"}
)
"""Tensor types of GGUF files that are served. The module that decodes them imports torch, which takes seconds."""

_CONFIGURATIONS = ("config.json", "params.json")
_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_MAX_JSON_BYTES = 64 << 20
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U64": 8, "U32": 4, "U16": 2}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Describes a model that was examined."""

    folder: Path
    files: tuple[str, ...]
    """The files that serving needs, relative to the folder."""
    main: str
    """The file that is served, or an empty string if the folder is."""
    format: Format


def examine(path: Path) -> Checkpoint:
    """Examines a GGUF file, any part of a split one, or a model's folder. Raises `CheckpointError` if it is damaged,
    incomplete, or of a kind that is not served."""
    if path.is_dir():
        try:
            names = names_in(path)
        except OSError as fault:
            raise CheckpointError(f"{path} cannot be read: {fault.strerror}; make it readable") from None
        if any(name.endswith(".safetensors") for name in names):
            return _safetensors_folder(path, names)
        if not any(name.endswith(".gguf") for name in names):
            raise CheckpointError(f"{path} {no_weights(names)}")
        return _gguf(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist; give the path of a GGUF file or of a model's folder")
    if is_gguf(path):
        return _gguf(path)
    remedy = "give the folder that it is in" if path.suffix in (".safetensors", ".json") else "give one of these"
    raise UsageError(f"{path} is neither a GGUF file nor a folder; {remedy}")


def no_weights(names: Iterable[str]) -> str:
    """Returns the end of a sentence on a model that has no weights in safetensors or GGUF."""
    pickled = next((name for name in names if name.endswith(PICKLED)), None)
    if pickled is None:
        return "has no weights: neither *.safetensors nor *.gguf; give a model's folder or repository"
    return (
        f"has weights in {short_repr(pickled)} and none in *.safetensors or *.gguf; such a file can run code when it "
        "is loaded, and is not added: convert it to safetensors"
    )


def _gguf(path: Path) -> Checkpoint:
    model = open_model(path)
    for name, location in model.tensors.items():
        if location.tensor.type.name not in SERVED_TYPES:
            raise CheckpointError(
                f"the tensor {name!r} of {location.file.path} has the type {location.tensor.type.name}, which is not "
                f"served; use a file of the types {', '.join(sorted(SERVED_TYPES))}"
            )
    configuration(model)  # raises for architectures and values that are not served
    for _ in checkpoint_tensors(model):
        pass
    files = tuple(file.path.name for file in model.files)
    found = Format("GGUF", _gguf_type(model), printable(model.text("general.architecture")))
    return Checkpoint(model.path.parent, files, files[0], found)


def _gguf_type(model: GgufModel) -> str:
    """Returns the type that the file declares as a whole, such as Q4_K_M, otherwise that of most of its bytes."""
    from gguf import LlamaFileType  # imported here, because the whole library takes long to import

    declared = model.number("general.file_type")
    if declared is not None and declared in list(LlamaFileType):
        return str(LlamaFileType(declared).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    sizes: Counter[str] = Counter()
    for location in model.tensors.values():
        sizes[location.tensor.type.name] += location.tensor.size
    return sizes.most_common(1)[0][0] if sizes else "without tensors"


def _safetensors_folder(folder: Path, names: Sequence[str]) -> Checkpoint:
    files = serving_files(names)
    configurations = [name for name in _CONFIGURATIONS if name in files]
    if not configurations:
        raise CheckpointError(
            f"{folder} has no config.json, which describes the model; add the folder of a whole model (adapters are "
            "served beside one, with --lora-modules)"
        )
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is not a file; replace it by the file of the model")
    config = read_json(folder / configurations[0])
    weights = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    tensors = {name: _safetensors_header(folder / name) for name in files if name.endswith(".safetensors")}
    if _INDEX in files:
        _require_index(folder, read_json(folder / _INDEX), tensors)
    else:
        _require_parts(folder, weights)
    return Checkpoint(folder, tuple(files), "", Format("safetensors", *_description(config, tensors)))


def _description(config: dict[str, Any], tensors: dict[str, dict[str, tuple[str, int]]]) -> tuple[str, str]:
    """Returns the quantization method or the dtype, and the architecture."""
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    sizes: Counter[str] = Counter()
    for found in tensors.values():
        for dtype, size in found.values():
            sizes[dtype] += size
    quantization = config.get("quantization_config") or config.get("compression_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    if method:
        return printable(method) + (f" {bits} bits" if type(bits) is int else ""), printable(named)
    return (sizes.most_common(1)[0][0] if sizes else "unknown"), printable(named)


def _safetensors_header(file: Path) -> dict[str, tuple[str, int]]:
    """Returns the dtype and the size of each tensor. The library compares the header with the size of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            found = {}
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                part = opened.get_slice(name)
                dtype = str(part.get_dtype())
                found[name] = (dtype, math.prod(part.get_shape()) * _SIZES.get(dtype, 1))
            return found
    except (SafetensorError, OSError, ValueError) as fault:
        raise CheckpointError(f"{file} is not a complete safetensors file ({fault}); download it again") from None


def _require_index(folder: Path, index: dict[str, Any], tensors: dict[str, dict[str, tuple[str, int]]]) -> None:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / _INDEX} has no weight_map; download it again")
    for tensor, file in weight_map.items():
        if file not in tensors:
            raise CheckpointError(
                f"{folder} has no {short_repr(file)}, in which {_INDEX} has the tensor {short_repr(tensor)}; download "
                "it again"
            )
        if tensor not in tensors[file]:
            raise CheckpointError(
                f"{folder / file} does not have the tensor {short_repr(tensor)}{nearest(tensor, tensors[file])} "
                f"which {_INDEX} lists in it; download both again"
            )


def _require_parts(folder: Path, weights: Sequence[str]) -> None:
    """Raises if a part of a checkpoint that was split is missing."""
    for name in weights:
        match = _PART.fullmatch(name)
        if match is not None:
            count = int(match["count"])
            parts = (f"{match['stem']}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))
            missing = next((part for part in parts if part not in weights), None)
            if missing is not None:
                raise CheckpointError(f"{folder} has {name} and no {missing}; download it again")


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises `CheckpointError` if the file has something else."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_JSON_BYTES + 1)
        found = json.loads(raw) if len(raw) <= _MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError) as fault:
        raise CheckpointError(f"{file} cannot be read ({fault}); download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a JSON object of at most {_MAX_JSON_BYTES >> 20} MiB; download it again")
    return found


def printable(value: object) -> str:
    """Returns a text from a file in a form that can be printed on a terminal."""
    return re.sub(r"[^\w.+ -]", "?", str(value), flags=re.ASCII)[:60] if value else "unknown"


def model_name(checkpoint: Checkpoint) -> str:
    """Returns the name under which a model is added if the user gives none."""
    if checkpoint.main:
        return name_of_file(checkpoint.main)
    folder = checkpoint.folder.resolve()
    if folder.parent.name == "snapshots":  # of the cache of huggingface_hub: models--USER--REPOSITORY/snapshots/COMMIT
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def name_of_file(file: str) -> str:
    """Returns the name of a GGUF file without its suffix and the number of its part."""
    stem = Path(file).name.removesuffix(".gguf")
    return re.sub(r"-\d{5}-of-\d{5}$", "", stem)
