"""Adds a model from a path, as a copy or as a link, and removes added models."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_backplane.added_models import entries, files
from vllm_backplane.added_models.checkpoint import Checkpoint, examine, model_name
from vllm_backplane.added_models.entries import Entry, File, Source
from vllm_backplane.added_models.progress import Progress, size_text
from vllm_backplane.errors import BackplaneError, CheckpointError, UsageError


def add_path(given: str, name: str | None, *, link: bool, replace: bool, progress: Progress) -> Entry:
    """Adds a GGUF file or a model's folder. Everything is verified before it can be served."""
    path = Path(os.path.abspath(Path(given).expanduser()))  # with its links: names of files in them are significant
    checkpoint = examine(path)
    _refuse_links_elsewhere(checkpoint, path)
    entries.require_recordable(path, checkpoint.files)
    name = name or model_name(checkpoint)
    entries.require_name(name)
    if not replace:
        entries.require_free(name)
    if link and checkpoint.folder.resolve().is_relative_to(entries.root().resolve()):
        raise UsageError(f"{path} belongs to an added model already; copy it, or link to a file outside the cache")
    with entries.locked(name, progress), entries.writing(name):
        if not replace:
            entries.require_free(name)  # another process may have added it while this one waited for the lock
        entries.discard(name)
        staged = entries.staging(name)
        staged.mkdir(mode=0o700)
        try:
            entry = _linked(name, checkpoint, progress) if link else _copied(name, checkpoint, path, progress)
            entries.publish(entry)
        except BaseException:
            entries.discard(name)
            raise
    return entry


def remove(given: str, *, force: bool, progress: Progress) -> str:
    """Removes an added model, or what an interrupted command left, and returns its name."""
    if entries.is_name(given) and given not in entries.names() and given in entries.unfinished():
        name = given
    else:
        try:
            name = entries.find(given).name
        except BackplaneError:
            if given not in entries.names():  # otherwise only its manifest cannot be read
                raise
            name = given
    with entries.locked(name, progress):
        users = [] if force else processes_with(entries.root() / name)
        if users:
            raise UsageError(
                f"{name} is used by the process {', '.join(map(str, users))}; end it first, or remove the model with "
                "--force"
            )
        entries.remove(name)
    return name


def processes_with(folder: Path) -> list[int]:
    """Returns the processes of this user that have mapped a file in a folder."""
    found = []
    within = f" {folder.resolve()}/"
    for one in os.scandir("/proc"):
        if one.name.isdecimal():
            try:
                with open(f"/proc/{one.name}/maps", encoding="utf-8", errors="replace") as maps:
                    if any(within in line for line in maps):
                        found.append(int(one.name))
            except OSError:
                continue  # it has ended, or belongs to another user
    return sorted(found)


def described(checkpoint: Checkpoint, digests: dict[str, str]) -> dict[str, File]:
    """Returns what the manifest states about the files, which have these digests."""
    found = {}
    for name, sha256 in digests.items():
        state = (checkpoint.folder / name).stat()
        found[name] = File(state.st_size, sha256, state.st_mtime_ns)
    return found


def _linked(name: str, checkpoint: Checkpoint, progress: Progress) -> Entry:
    digests = {file: files.digest(checkpoint.folder / file, progress, f"verifying {file}") for file in checkpoint.files}
    source = Source("link", str(checkpoint.folder))
    return Entry(name, source, checkpoint.format, checkpoint.main, described(checkpoint, digests))


def _copied(name: str, checkpoint: Checkpoint, given: Path, progress: Progress) -> Entry:
    target = entries.staging(name) / entries.FILES
    target.mkdir(mode=0o700)
    sizes = {file: (checkpoint.folder / file).stat().st_size for file in checkpoint.files}
    total = sum(sizes.values())
    if not _can_clone(checkpoint.folder / checkpoint.files[0], target / ".clone"):
        entries.require_space(total, f"a copy of {given}")
    digests = {}
    progress.report(f"copying {name} ({size_text(total)})")
    with progress.bar(f"copying {name}", total) as advance:
        for file in checkpoint.files:
            (target / file).parent.mkdir(mode=0o700, exist_ok=True)
            digests[file] = files.copy((checkpoint.folder / file).resolve(), target / file, advance)
    copied = examine(target / checkpoint.main if checkpoint.main else target)
    if (copied.files, copied.format) != (checkpoint.files, checkpoint.format):
        raise CheckpointError(f"{given} was changed while it was copied; add it again when it is complete")
    for folder in {(target / file).parent for file in checkpoint.files}:
        files.sync_folder(folder)
    return Entry(name, Source("copy", str(given)), copied.format, copied.main, described(copied, digests))


def _can_clone(source: Path, target: Path) -> bool:
    """Returns whether the file system makes copies that take no space."""
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return files.clone(reading, writing)
    finally:
        os.close(reading)
        os.close(writing)
        target.unlink()


def _refuse_links_elsewhere(checkpoint: Checkpoint, given: Path) -> None:
    """Raises for links in a folder that lead out of it, except from a snapshot in a Hugging Face cache to its blobs.

    A file that the user names may be a link.
    """
    if not given.is_dir():
        return
    folder = checkpoint.folder.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    for file in checkpoint.files:
        target = (folder / file).resolve()
        if not any(target.is_relative_to(one) for one in allowed):
            raise CheckpointError(
                f"{given / file} is a link to {target}, outside of its folder; replace it by the file itself, or give "
                "the folder that has the files"
            )
