"""The folder that stands for a GGUF file wherever vLLM wants a model's folder: configuration and tokenizer, no weights.

It is made from the file's own metadata, once, and kept among temporary files (`derived_folder`). Its name changes with
the file's place, its metadata and the version of what makes it; contents are compared with its manifest each time, and
a damaged folder is made again.
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
from vllm_backplane.gguf.architectures import named
from vllm_backplane.gguf.blocks import insist_on_served
from vllm_backplane.gguf.configuration import QUANTIZATION, configuration
from vllm_backplane.gguf.model_files import Gguf, opened
from vllm_backplane.models.cache import MANIFEST, damage, derived_folder
from vllm_backplane.models.package import sha256

RECIPE = 4
"""Raised when the same file gives another folder than before, or none."""


def described(path: str | Path) -> Path:
    """The folder for a GGUF file, a part of a split one, or a folder that holds either."""
    model = opened(path)
    place = str(model.path.absolute())
    key = hashlib.sha256(f"{RECIPE} {place} {model.header_digest()}".encode()).hexdigest()[:16]
    folder = derived_folder() / "gguf" / f"{model.path.stem}-{key}"
    if not damage(folder, hashes=True):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(".partial", f".{folder.name}-", folder.parent) as scratch:
            result = Path(scratch, "result")
            result.mkdir()
            _fill(model, place, result)
            if folder.exists() and damage(folder, hashes=True):
                shutil.rmtree(folder)
            try:
                result.rename(folder)
            except OSError:
                # Another process was faster; what it made is as good if it is whole.
                if damage(folder, hashes=True):
                    raise
    except OSError as fault:
        raise CheckpointError(
            f"cannot write what vLLM needs to know of {model.path} into {folder.parent}: {fault}; set BACKPLANE_CACHE "
            "to a folder that can be written to"
        ) from fault
    return folder


def _fill(model: Gguf, place: str, folder: Path) -> None:
    for one in named(model):
        insist_on_served(one.placed.tensor.type, f"the tensor {one.placed.tensor.name!r} of {one.placed.file.path}")
    made = configuration(model)
    made["quantization_config"] = {"quant_method": QUANTIZATION, "file": place, "header": model.header_digest()}
    _write(folder / "config.json", made)
    tokenizer.write(model, folder, made["max_position_embeddings"])
    files = {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    _write(folder / MANIFEST, {"source": place, "recipe": RECIPE, "files": files})


def source(stated: dict[str, Any]) -> Gguf:
    """The opened model that a folder's quantization_config names, unchanged since the folder was made."""
    model = opened(str(stated["file"]))
    if model.header_digest() != stated["header"]:
        raise CheckpointError(
            f"{model.path} has changed since its configuration was read; start again with the path of the GGUF file"
        )
    return model


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
