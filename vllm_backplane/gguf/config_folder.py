"""Makes the folder with configuration and tokenizer that vLLM is given in place of a GGUF file.

vLLM expects a model's folder. This one has no weights: it is made once from the file's metadata, and kept among
temporary files (`derived_folder`). Its name depends on the path of the file, its metadata and `RECIPE`. Its contents
are compared with its manifest on every use, and a damaged folder is made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf import tokenizer
from vllm_backplane.gguf.architectures import checkpoint_tensors
from vllm_backplane.gguf.decoding import require_served_type
from vllm_backplane.gguf.hf_config import QUANTIZATION, configuration
from vllm_backplane.gguf.model_files import GgufModel, open_model
from vllm_backplane.models.cache import MANIFEST, close_to_others, create, damage, derived_folder
from vllm_backplane.models.package import sha256

RECIPE = 7
"""Version of this code's output. It is incremented when the same file gives a different folder, or an error."""
_NAME_CHARACTERS = 48
"""Characters of the file's name in the name of its folder. File systems allow 255 bytes, four per character at most."""


def config_folder(path: str | Path) -> Path:
    """Returns the folder for a GGUF file, a part of a split file, or a folder that contains either; makes it if needed.

    Raises `CheckpointError` for a file that cannot be served.
    """
    model = open_model(path)
    source = str(model.path.absolute())
    key = hashlib.sha256(f"{RECIPE} {source} {model.header_digest()}".encode()).hexdigest()[:16]
    folder = derived_folder() / "gguf" / f"{model.path.stem[:_NAME_CHARACTERS]}-{key}"
    if not damage(folder, hashes=True):
        return folder
    try:
        create(folder.parent)
        with tempfile.TemporaryDirectory(".partial", f".{folder.name}-", folder.parent) as scratch:
            result = Path(scratch, "result")
            result.mkdir()
            _fill(model, source, result)
            close_to_others(result)
            if folder.exists() and damage(folder, hashes=True):
                shutil.rmtree(folder)
            try:
                result.rename(folder)
            except OSError:
                # Another process has made the folder meanwhile, which can be used if it is complete.
                if damage(folder, hashes=True):
                    raise
    except OSError as fault:
        raise CheckpointError(
            f"cannot write the configuration and tokenizer of {model.path} into {folder.parent}: {fault}; set "
            "BACKPLANE_CACHE to a writable folder"
        ) from fault
    return folder


def _fill(model: GgufModel, source: str, folder: Path) -> None:
    for one in checkpoint_tensors(model):
        tensor, file = one.location.tensor, one.location.file
        require_served_type(tensor.type, f"the tensor {tensor.name!r} of {file.path}")
    config = configuration(model)
    config["quantization_config"] = {"quant_method": QUANTIZATION, "file": source, "header": model.header_digest()}
    _write(folder / "config.json", config)
    tokenizer.write(model, folder, config["max_position_embeddings"])
    files = {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    _write(folder / MANIFEST, {"source": source, "recipe": RECIPE, "files": files})


def open_source(quantization_config: dict[str, Any]) -> GgufModel:
    """Opens the GGUF model that a folder was made from.

    Raises `CheckpointError` if the model has changed since the folder was made.
    """
    model = open_model(str(quantization_config["file"]))
    if model.header_digest() != quantization_config["header"]:
        raise CheckpointError(
            f"{model.path} has changed since its configuration was read; start again with the path of the GGUF file"
        )
    return model


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
