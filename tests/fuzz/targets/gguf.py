"""Defines the fuzz targets of the GGUF reader, which compare accepted files with what the `gguf` package reads."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tempfile
from math import prod
from pathlib import Path
from typing import Any

from tests.fuzz.campaign import Target
from tests.fuzz.mutations import mutate_bytes


def _prepare() -> None:
    os.environ["BACKPLANE_CACHE"] = str(_folder() / "cache")


def _folder() -> Path:
    """Returns the folder of this campaign for files."""
    return Path(tempfile.gettempdir())


def read_file(data: bytes) -> None:
    """Reads a file, and compares metadata and tensors with those of the `gguf` package."""
    from gguf import GGUFReader

    from vllm_backplane.gguf.cursor import Limits
    from vllm_backplane.gguf.file import GgufFile

    path = _folder() / "model.gguf"
    path.write_bytes(data)
    # Limits that short inputs can exceed.
    model = GgufFile(path, Limits(strings=24, inner_arrays=8, nesting=2))
    for one in model.tensors.values():
        assert len(model.bytes_of(one)) == one.size
        assert one.row_bytes * prod(one.shape[:-1]) == one.size
    try:
        other = GGUFReader(path)
    except Exception as fault:
        raise AssertionError(f"accepted, but the gguf package refuses it: {fault!r}") from fault
    mine = {name: (one.type, one.shape, one.offset, one.size) for name, one in model.tensors.items()}
    theirs = {
        one.name: (one.tensor_type, tuple(map(int, reversed(one.shape.tolist()))), one.data_offset, int(one.n_bytes))
        for one in other.tensors
    }
    assert mine == theirs
    fields = {name: field for name, field in other.fields.items() if not name.startswith("GGUF.")}
    assert model.metadata.keys() == fields.keys()
    for name, field in fields.items():
        if field.types[0].name != "ARRAY" or (len(field.types) > 1 and field.types[1].name != "ARRAY"):
            assert _same(model.metadata[name], field.contents()), name


def _same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal, NaN included."""
    if isinstance(one, (list, tuple)) or hasattr(one, "tolist"):
        ours = one.tolist() if hasattr(one, "tolist") else list(one)
        return len(ours) == len(other) and all(map(_same, ours, other))
    return bool(one == other or (one != one and other != other))


def describe_model(data: bytes) -> None:
    """Makes configuration, tokenizer and tensors of a sound model with changes (`tests/valid_gguf_models.py`)."""
    import torch

    from tests.valid_gguf_models import mutated_model
    from vllm_backplane.gguf import architectures, config_folder, lazy_tensor
    from vllm_backplane.gguf.model_files import open_model

    contents = mutated_model(data[:9])
    count = len(contents)
    paths = [_folder() / (f"m-{one:05}-of-{count:05}.gguf" if count > 1 else "m.gguf") for one in range(1, count + 1)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    result = config_folder.config_folder(paths[0])
    config = json.loads((result / "config.json").read_text())
    # No size in a configuration exceeds that of the file.
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"):
        assert 0 < config[name] <= sum(map(len, contents)), name
    first = _files(result)
    shutil.rmtree(result)
    result = config_folder.config_folder(paths[0])
    assert _files(result) == first, "the same model gave other files the second time"
    shutil.rmtree(result)
    for one in architectures.checkpoint_tensors(open_model(paths[0])):
        for name, loaded in lazy_tensor.named_tensors(one):
            assert "{" not in name
            torch.zeros(loaded.shape).copy_(loaded)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def build_tokenizer(data: bytes) -> None:
    """Makes a tokenizer from the metadata in a JSON document, and compares its vocabulary with the metadata."""
    from tests.valid_gguf_models import MODELS, built
    from vllm_backplane.errors import CheckpointError
    from vllm_backplane.gguf import config_folder
    from vllm_backplane.gguf.model_files import open_model

    try:
        given = json.loads(data)
    except (ValueError, RecursionError) as fault:
        raise CheckpointError("not JSON") from fault  # the input of this target, not of the parser
    if not isinstance(given, dict):
        raise CheckpointError("not an object")
    path = _folder() / "t.gguf"
    try:
        path.write_bytes(built(MODELS["llama"], {f"tokenizer.{name}": one for name, one in given.items()}))
    except (TypeError, ValueError, AttributeError, OverflowError, struct.error) as fault:
        raise CheckpointError("the format cannot store this") from fault
    result = config_folder.config_folder(path)
    try:
        from tokenizers import Tokenizer

        if not (result / "tokenizer.json").exists():  # the file states that it has no tokenizer
            return
        tokenizer = Tokenizer.from_file(str(result / "tokenizer.json"))
        tokens = open_model(path).metadata["tokenizer.ggml.tokens"]
        assert [tokenizer.id_to_token(number) for number in range(len(tokens))] == list(tokens)
        encoded = tokenizer.encode("ab a", add_special_tokens=True)
        assert all(0 <= token < tokenizer.get_vocab_size() for token in encoded.ids)
        tokenizer.decode(encoded.ids)
    finally:
        shutil.rmtree(result)


def _mutate_header(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Changes the first 24 bytes: magic, version and the two counts."""
    return mutate_bytes(data[:24], [one[:24] for one in others], chance)[:24] + data[24:]


def targets() -> list[Target]:
    """Returns the targets of this file."""
    from tests.fuzz.mutations import mutate_json_bytes
    from vllm_backplane.errors import CheckpointError

    covered, clean = ("vllm_backplane/gguf",), (CheckpointError,)
    common: dict[str, Any] = {"imports": ("gguf", "vllm_backplane.gguf.config_folder"), "prepare": _prepare}
    return [
        Target("gguf-header", read_file, clean, covered, mutate=_mutate_header, **common),
        Target("gguf-file", read_file, clean, covered, **common),
        Target("gguf-model", describe_model, clean, covered, **common, memory=64 << 20),
        Target("gguf-tokenizer", build_tokenizer, clean, covered, mutate=mutate_json_bytes, **common, multiple=256),
    ]
