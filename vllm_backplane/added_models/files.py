"""Selects, copies and digests files of models. What may take long has progress."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from vllm_backplane.added_models.progress import Advance, Progress
from vllm_backplane.errors import BackplaneError

_CHUNK = 4 << 20
_FICLONE = 0x40049409
"""The request of Linux that makes a file share the blocks of another (linux/fs.h)."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")
_MAX_NAME_BYTES = 200
"""Bytes of each part of a name. File systems allow 255, and unfinished files have a suffix."""
_TOP_LEVEL = re.compile(r"[^/]+\.(json|jinja|txt|tiktoken|py|model(\.v\d+)?)")
"""Configuration, tokenizer and chat template. vLLM runs the code in ``*.py`` with --trust-remote-code only."""
_IN_FOLDERS = re.compile(r"additional_chat_templates/[^/]+\.jinja|\d+_\w+/[^/]+\.(json|safetensors|txt|model)")
"""Further chat templates, and the modules of sentence-transformers, such as ``1_Pooling/config.json``."""


def is_safe_name(name: str) -> bool:
    """Returns whether a name from elsewhere stays inside the folder that it is joined to."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and name == "/".join(parts)
        and ".." not in parts
        and _CONTROL.search(name) is None
        and all(len(part.encode(errors="replace")) <= _MAX_NAME_BYTES for part in parts)
        and name.isprintable()
    )


def serving_files(names: Iterable[str]) -> list[str]:
    """Returns the files of a safetensors checkpoint that serving needs.

    Weights in Mistral's own form (``consolidated*``) are left out where the repository also has them in the usual form.
    """
    given = [name for name in names if not name.startswith(".")]
    weights = [name for name in given if name.endswith(".safetensors") and "/" not in name]
    usual = [name for name in weights if not name.startswith("consolidated")]
    if usual:
        weights = usual
    left_out = ("consolidated.safetensors.index.json",) if usual else ()
    others = [
        name
        for name in given
        if (_TOP_LEVEL.fullmatch(name) or _IN_FOLDERS.fullmatch(name))
        and not name.endswith((".bin.index.json", ".msgpack.index.json", ".h5.index.json"))
        and name not in left_out
    ]
    return sorted({*weights, *others})


def names_in(folder: Path) -> list[str]:
    """Returns the names of the files of a folder and of the folders in it, without following links to folders."""
    found = []
    for base, folders, names in os.walk(folder, onerror=_raise):
        if Path(base) != folder:
            folders.clear()
        found += [str(Path(base, name).relative_to(folder)) for name in names]
    return sorted(found)


def _raise(fault: OSError) -> None:
    raise fault


def digest(path: Path, progress: Progress, label: str) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as stream, progress.bar(label, os.fstat(stream.fileno()).st_size) as advance:
        return _read(path, stream, advance)


def copy(source: Path, target: Path, advance: Advance) -> str:
    """Copies a regular file to a new one, which is on disk afterwards, and returns its SHA-256.

    Where the file system can, the copy shares the blocks of the original until one of them is changed.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(reading, "rb") as origin:
        before = os.fstat(reading)
        if not stat.S_ISREG(before.st_mode):
            raise BackplaneError(f"{source} is not a regular file; give a GGUF file or a model's folder")
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(writing, "wb") as result:
            found = _read(source, origin, advance, None if clone(reading, writing) else result)
            result.flush()
            os.fsync(writing)
            copied = os.fstat(writing).st_size
        after = os.fstat(reading)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns) or copied != before.st_size:
            raise BackplaneError(f"{source} was changed while it was copied; add it again when it is complete")
    return found


def clone(source: int, target: int) -> bool:
    """Makes the open file `target` share the blocks of `source`. Returns whether the file system can."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as fault:
        if fault.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM):
            return False
        raise
    return True


def _read(path: Path, stream: BinaryIO, advance: Advance, copy_to: BinaryIO | None = None) -> str:
    found = hashlib.sha256()
    while chunk := _chunk(path, stream):
        found.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
        advance(len(chunk))
    return found.hexdigest()


def _chunk(path: Path, stream: BinaryIO) -> bytes:
    try:
        return stream.read(_CHUNK)
    except OSError as fault:  # which does not name the file
        raise OSError(fault.errno, fault.strerror, str(path)) from fault


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
