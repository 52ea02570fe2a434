"""Opens a GGUF model, which may be one file, the parts of a split file, or a folder that contains either.

Parts are named NAME-00001-of-00003.gguf. The metadata of each part has its number and the number of parts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vllm_backplane.errors import CheckpointError, short_repr
from vllm_backplane.gguf.cursor import Strings
from vllm_backplane.gguf.file import GgufFile, Tensor, is_gguf

_Kind = TypeVar("_Kind")
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class TensorLocation(NamedTuple):
    """Locates a tensor by the file that contains it."""

    file: GgufFile
    tensor: Tensor


class GgufModel:
    """Reads all files of one model: the metadata of the first, and the tensors of all."""

    def __init__(self, files: list[GgufFile]) -> None:
        self.files = files
        self.metadata: dict[str, Any] = files[0].metadata
        self.tensors: dict[str, TensorLocation] = {}
        for file in files:
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"the tensor {name!r} is in {self.tensors[name].file.path} and in {file.path}; the parts do "
                        "not belong together: download them again"
                    )
                self.tensors[name] = TensorLocation(file, tensor)

    @property
    def path(self) -> Path:
        return self.files[0].path

    @property
    def size(self) -> int:
        return sum(len(file.data) for file in self.files)

    def header_digest(self) -> str:
        return hashlib.sha256("".join(file.header_digest() for file in self.files).encode()).hexdigest()

    def text(self, key: str) -> str | None:
        return self._of(key, str)

    def number(self, key: str) -> int | None:
        return self._of(key, int)

    def real(self, key: str) -> float | None:
        found = self.metadata.get(key)
        return float(found) if type(found) is int else self._of(key, float)

    def boolean(self, key: str) -> bool | None:
        return self._of(key, bool)

    def strings(self, key: str) -> Strings | None:
        return self._of(key, Strings)

    def numbers(self, key: str, *, integers: bool = False) -> list[Any] | None:
        """Returns an array of finite floating-point numbers, or of `integers`. Raises `CheckpointError` otherwise."""
        found = self._of(key, np.ndarray)
        if found is None:
            return None
        if found.dtype.kind not in ("iu" if integers else "f") or not np.isfinite(found).all():
            raise self._wrong(key, f"{found.dtype} or infinite values", "integers" if integers else "finite numbers")
        return list(found.tolist())

    def _of(self, key: str, kind: type[_Kind]) -> _Kind | None:
        found = self.metadata.get(key)
        if found is not None and type(found) is not kind:
            raise self._wrong(key, _name(type(found)), _name(kind))
        return found

    def _wrong(self, key: str, found: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: the metadata {key} is {found} instead of {expected}; convert the model again with a current "
            "converter"
        )


def _name(kind: type) -> str:
    """Returns what a metadata value of this type is called."""
    return {Strings: "an array of texts", list: "an array of arrays", np.ndarray: "an array of numbers"}.get(
        kind, f"a value of type {kind.__name__}"
    )


def open_model(path: str | Path) -> GgufModel:
    """Opens the model of a file, of any part of a split file, or of a folder that contains one model."""
    given = Path(path)
    first = _only_model(given) if _is_folder(given) else given
    match = _PART.fullmatch(first.name)
    if match is None:
        file = GgufFile(first)
        _refuse_unnumbered_part(file)
        return GgufModel([file])
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (first.parent / name).is_file()]
    if missing or not names:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(
            f"{first} is part of a file that was split into {count}, and {shown or 'all'} of them are missing in "
            f"{first.parent}; put all parts into one folder"
        )
    files = [GgufFile(first.parent / name) for name in names]
    for number, file in enumerate(files):
        declared = _integer(file, "split.no"), _integer(file, "split.count")
        if declared != (number, count):
            raise CheckpointError(
                f"{file.path} is named part {number + 1} of {count}, and its metadata (split.no, split.count) has "
                f"{declared}; give the parts their original names"
            )
    model = GgufModel(files)
    total = _integer(files[0], "split.tensors.count")
    if total != len(model.tensors):
        raise CheckpointError(
            f"the parts of {first} have {len(model.tensors)} tensors, and the metadata declares {total} "
            "(split.tensors.count); download them again"
        )
    return model


def is_model(path: str | Path) -> bool:
    """Returns whether `path` is a GGUF file, or a folder that has GGUF files and no other weights.

    Such a folder may have a config.json and tokenizer files for other programs. They are ignored: the configuration and
    the tokenizer of the GGUF file are used.
    """
    given = Path(path)
    if _is_folder(given):
        return bool(_models(given)) and not has_other_weights(file.name for file in given.iterdir())
    return is_gguf(given)


def _is_folder(path: Path) -> bool:
    """Returns whether `path` is a folder. Raises `CheckpointError` if the path itself cannot be used."""
    try:
        str(path).encode()  # the path is written to files, which are UTF-8
        return path.is_dir()
    except UnicodeEncodeError:
        raise CheckpointError(f"the path {short_repr(str(path))} is not UTF-8; rename the file or its folder") from None
    except OSError as fault:
        raise CheckpointError(
            f"{short_repr(str(path))} cannot be opened: {fault.strerror}; give the path or the name of a model"
        ) from None


def has_other_weights(names: Iterable[str]) -> bool:
    return any(name.endswith(_OTHER_WEIGHTS) for name in names)


def _integer(file: GgufFile, key: str) -> int | None:
    """Returns the value of `key`, or None where it is missing or of another type, such as an array."""
    found = file.metadata.get(key)
    return found if type(found) is int else None


def _refuse_unnumbered_part(file: GgufFile) -> None:
    count = _integer(file, "split.count") or 0
    if count > 1:
        raise CheckpointError(
            f"{file.path} is one of {count} parts according to its metadata, and its name has no part number; name the "
            "parts NAME-00001-of-00003.gguf and so on"
        )


def is_first_part(name: str) -> bool:
    """Returns whether a file of this name is a whole model or the first part of one.

    Image projectors (mmproj) are not: they belong to a model in another file.
    """
    match = _PART.fullmatch(name)
    return not name.startswith("mmproj") and (match is None or int(match["number"]) == 1)


def part_pattern(name: str) -> str | None:
    """Returns the glob pattern of all parts if `name` is the name of a part."""
    match = _PART.fullmatch(name)
    return f"{match['stem']}-*-of-{match['count']}.gguf" if match else None


def _models(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("*.gguf")) if file.is_file() and is_first_part(file.name)]


def _only_model(folder: Path) -> Path:
    found = _models(folder)
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(f"{folder} has no GGUF file, or no first part of one; give a file or another folder")
    names = ", ".join(file.name for file in found[:8])
    raise CheckpointError(f"{folder} has {len(found)} models: {names}; give the path of one of these files")
