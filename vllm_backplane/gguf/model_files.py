"""A model in GGUF: one file, the parts of a split one, or a folder that holds either.

Parts are named NAME-00001-of-00003.gguf; each says in its metadata which it is, and of how many.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.file import GgufFile, Tensor, is_gguf

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Placed(NamedTuple):
    file: GgufFile
    tensor: Tensor


class Gguf:
    """All parts of one model."""

    def __init__(self, files: list[GgufFile]) -> None:
        self.files = files
        self.metadata: dict[str, Any] = files[0].metadata
        self.tensors: dict[str, Placed] = {}
        for file in files:
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"the tensor {name!r} is in {self.tensors[name].file.path} and in {file.path}; the parts do "
                        "not belong together: fetch them again"
                    )
                self.tensors[name] = Placed(file, tensor)

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

    def truth(self, key: str) -> bool | None:
        return self._of(key, bool)

    def words(self, key: str) -> list[str] | None:
        found = self._of(key, list)
        if found is not None and not all(type(word) is str for word in found):
            raise self._wrong(key, "a list of other things", "a list of words")
        return found

    def numbers(self, key: str, *, whole: bool = False) -> list[Any] | None:
        """Of an array of numbers; all of them finite, or whole."""
        found = self._of(key, np.ndarray)
        if found is None:
            return None
        if found.dtype.kind not in ("iu" if whole else "f") or not np.isfinite(found).all():
            raise self._wrong(key, f"{found.dtype} or infinite values", "whole numbers" if whole else "finite numbers")
        return list(found.tolist())

    def _of(self, key: str, kind: type) -> Any:
        found = self.metadata.get(key)
        if found is not None and type(found) is not kind:
            raise self._wrong(key, type(found).__name__, kind.__name__)
        return found

    def _wrong(self, key: str, found: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} has {found} for {key} where {expected} belongs; make the file anew with a current converter"
        )


def opened(path: str | Path) -> Gguf:
    """The model that a file, any part of a split file, or a folder holds."""
    given = Path(path)
    first = _only_model(given) if given.is_dir() else given
    match = _PART.fullmatch(first.name)
    if match is None:
        file = GgufFile(first)
        _refuse_lone_part(file)
        return Gguf([file])
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (first.parent / name).is_file()]
    if missing or not names:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(
            f"{first} is part of a file that was split into {count}, and {shown or 'all'} of them are not in "
            f"{first.parent}; put all parts into one folder"
        )
    files = [GgufFile(first.parent / name) for name in names]
    for number, file in enumerate(files):
        stated = _whole(file, "split.no"), _whole(file, "split.count")
        if stated != (number, count):
            raise CheckpointError(
                f"{file.path} is named part {number + 1} of {count}, and its metadata (split.no, split.count) say "
                f"{stated}; give the parts the names they were made with"
            )
    model = Gguf(files)
    total = _whole(files[0], "split.tensors.count")
    if total != len(model.tensors):
        raise CheckpointError(
            f"the parts of {first} have {len(model.tensors)} tensors, and {total} are announced; fetch them again"
        )
    return model


def is_model(path: str | Path) -> bool:
    """Whether `path` names a GGUF file, or a folder that has GGUF files and no other weights. It may have config.json
    and a tokenizer, as other programs want them beside the file; those of the file count."""
    given = Path(path)
    if given.is_dir():
        return bool(_models(given)) and not has_other_weights(file.name for file in given.iterdir())
    return is_gguf(given)


def has_other_weights(names: Iterable[str]) -> bool:
    return any(name.endswith(_OTHER_WEIGHTS) for name in names)


def _whole(file: GgufFile, key: str) -> int | None:
    """None where the file has nothing there, or something else, such as an array."""
    found = file.metadata.get(key)
    return found if type(found) is int else None


def _refuse_lone_part(file: GgufFile) -> None:
    count = _whole(file, "split.count") or 0
    if count > 1:
        raise CheckpointError(
            f"{file.path} is one of {count} parts by its metadata, and its name does not say which; name the parts "
            "NAME-00001-of-00003.gguf and so on, as they were made"
        )


def is_first(name: str) -> bool:
    """Whether a file of this name is a model, or the first part of one; projectors of images belong to a model."""
    match = _PART.fullmatch(name)
    return not name.startswith("mmproj") and (match is None or int(match["number"]) == 1)


def parts_of(name: str) -> str | None:
    """A pattern of the names of all parts, if this is the name of one."""
    match = _PART.fullmatch(name)
    return f"{match['stem']}-*-of-{match['count']}.gguf" if match else None


def _models(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("*.gguf")) if file.is_file() and is_first(file.name)]


def _only_model(folder: Path) -> Path:
    found = _models(folder)
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(f"{folder} has no GGUF file, or no first part of one; name a file or another folder")
    names = ", ".join(file.name for file in found[:8])
    raise CheckpointError(f"{folder} has {len(found)} models: {names}; name one of these files")
