"""Downloads models from a Hugging Face hub by name: ``user/repository:Q4_K_M``, ``:file.gguf`` or ``@revision``.

Requests and retries are those of the library huggingface_hub, with its variables (HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE). The library drops what it has of a file when its process ends, so this module keeps it, in the folder
of the unfinished addition, and requests the rest the next time. Files are compared with the digests that the hub states
for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from vllm_backplane.added_models import entries
from vllm_backplane.added_models.adding import described
from vllm_backplane.added_models.checkpoint import examine, name_of_file, no_weights
from vllm_backplane.added_models.entries import Entry, Source
from vllm_backplane.added_models.files import digest, is_safe_name, serving_files, sync_folder
from vllm_backplane.added_models.hub_names import HubName
from vllm_backplane.added_models.progress import Progress, size_text
from vllm_backplane.errors import BackplaneError, CheckpointError, UsageError, short_repr
from vllm_backplane.gguf.hub import http_library
from vllm_backplane.gguf.model_files import is_first_part, part_pattern

PLAN = "download.json"
_LABEL = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q[1-8](?:_[A-Za-z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32)(?![A-Za-z0-9])",
    re.IGNORECASE,
)
"""Names of quantization types as publishers write them into names of files."""
_NOT_SERVED = re.compile(r"(?:UD-)?(?:I?Q1|IQ2|IQ3|IQ4_XS|TQ|MXFP4|NVFP4)", re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_LISTED = 12


@dataclass(frozen=True, slots=True)
class HubFile:
    """Describes a file of a repository, as the hub does."""

    name: str
    size: int
    sha256: str
    """The digest of a file that is stored outside of Git; an empty string for others."""
    blob: str
    """The identity that Git gives to the content of the other files."""


def add_from_hub(hub_name: HubName, name: str | None, *, replace: bool, progress: Progress) -> Entry:
    """Downloads a model and adds it. An interrupted download is continued by the next call with the same names."""
    for library in ("huggingface_hub", "tqdm"):
        if find_spec(library) is None:
            raise BackplaneError(f"downloading from a hub needs {library}; run: pip install {library}")
    commit, offered = _offered(hub_name)
    if hub_name.is_gguf:
        wanted = choose_gguf([file.name for file in offered], hub_name)
    else:
        wanted = _choose_safetensors([file.name for file in offered], hub_name)
    chosen = [file for file in offered if file.name in wanted]
    for file in chosen:
        _require_verifiable(file, hub_name)
    # Files of one model are in one folder, whatever folder they are in on the hub.
    below = f"{Path(wanted[0]).parent}/" if hub_name.is_gguf and "/" in wanted[0] else ""
    name = name or (name_of_file(wanted[0]) if hub_name.is_gguf else hub_name.repository.partition("/")[2])
    entries.require_name(name)
    existing = _same(name, hub_name, commit, chosen, below, progress)
    if existing is not None and not replace:
        return existing
    if not replace:
        entries.require_free(name)
    with entries.locked(name, progress), entries.writing(name):
        existing = _same(name, hub_name, commit, chosen, below, progress)
        if existing is not None and not replace:
            return existing  # another process has added it while this one waited for the lock
        if not replace:
            entries.require_free(name)
        _prepare(name, hub_name, commit, chosen)
        target = entries.staging(name) / entries.FILES
        digests = {}
        try:
            for file in chosen:
                local = file.name.removeprefix(below)
                digests[local] = _fetched(hub_name, commit, file, target / local, progress)
        except KeyboardInterrupt:
            progress.report(
                f"interrupted; run the same command again to continue, or: vllm-backplane model remove {name}"
            )
            raise
        try:
            checkpoint = examine(target / wanted[0].removeprefix(below) if hub_name.is_gguf else target)
            if set(checkpoint.files) != set(digests):
                raise CheckpointError(
                    f"{hub_name} consists of other files than were downloaded; choose one by its name"
                )
        except CheckpointError:
            entries.discard(name)
            raise
        for folder in {(target / file).parent for file in digests}:
            sync_folder(folder)
        source = Source("hub", "", hub_name.repository, hub_name.selector, hub_name.revision, commit, _endpoint())
        entry = Entry(name, source, checkpoint.format, checkpoint.main, described(checkpoint, digests))
        entries.publish(entry)
        (entries.root() / name / PLAN).unlink()  # until here, another attempt can use the files
    return entry


def choose_gguf(names: Sequence[str], hub_name: HubName) -> list[str]:
    """Returns the GGUF file of a repository that was requested, or all parts of a split one, the first one first."""
    selector = hub_name.selector
    models = [name for name in names if name.endswith(".gguf") and is_first_part(Path(name).name)]
    if selector.endswith(".gguf"):
        found = [name for name in names if name == selector] or [n for n in names if Path(n).name == selector]
    else:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(selector)}(?![A-Za-z0-9_])", re.IGNORECASE)
        found = [name for name in models if pattern.search(name.removesuffix(".gguf"))]
    if not models:
        raise UsageError(
            f"{hub_name.repository} has no GGUF files; leave out ':{selector}' to add its safetensors weights"
        )
    if not found:
        raise UsageError(f"{hub_name.repository} has no {short_repr(selector)}; it has {_list(models)}")
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} files of {hub_name.repository} are {short_repr(selector)}; choose one of these by its name, "
            f"as in {hub_name.repository}:{found[0]}: {', '.join(found[:_LISTED])}"
        )
    label = _LABEL.search(Path(found[0]).name)
    if label is not None and _NOT_SERVED.match(label[0]):
        raise UsageError(f"GGUF files of the type {label[0]} are not served; choose another: {_list(models)}")
    pattern_of_parts = part_pattern(found[0])
    if pattern_of_parts is None:
        return found
    stem, _, rest = pattern_of_parts.rpartition("-*-of-")
    count = int(rest.removesuffix(".gguf"))
    parts = [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [part for part in parts if part not in names]
    if missing:
        raise BackplaneError(f"{hub_name.repository} has no {missing[0]}, a part of {found[0]}; choose another file")
    return parts


def _list(models: Sequence[str]) -> str:
    """Returns the quantizations of files, or their names where these do not contain one."""
    labels = [match[0] if (match := _LABEL.search(Path(name).name)) else name for name in models]
    shown = sorted(dict.fromkeys(labels))
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return ", ".join(shown[:_LISTED]) + more


def _choose_safetensors(names: Sequence[str], hub_name: HubName) -> list[str]:
    repository = hub_name.repository
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        return serving_files(names)
    models = [name for name in names if name.endswith(".gguf") and is_first_part(Path(name).name)]
    if models:
        raise UsageError(
            f"{repository} has GGUF files: {_list(models)}; choose one, as in {repository}:"
            f"{_list(models).partition(',')[0].partition(' ')[0]}"
        )
    raise BackplaneError(f"{repository} {no_weights(names)}")


def _offered(hub_name: HubName) -> tuple[str, list[HubFile]]:
    """Returns the commit of the requested revision, and its files with safe names."""
    from huggingface_hub import HfApi, constants

    with _hub_errors(hub_name):
        info = HfApi().model_info(
            hub_name.repository,
            revision=hub_name.revision or None,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        commit = str(info.sha)
        if not _SHA1.fullmatch(commit):
            raise ValueError(f"the revision {short_repr(commit)}")
        found = {one.rfilename: _file(one) for one in info.siblings or ()}
    # Other names, which could lead out of the folder or contain what a terminal executes, are not even shown.
    return commit, [file for name, file in found.items() if is_safe_name(name)]


def _file(sibling: Any) -> HubFile:
    name, size, stored = sibling.rfilename, sibling.size, sibling.lfs
    if not isinstance(name, str) or (size is not None and (type(size) is not int or size < 0)):
        raise ValueError(f"the file {short_repr(name)} of {short_repr(size)} bytes")
    digest_of_lfs = str(stored.sha256) if stored else ""
    return HubFile(name, -1 if size is None else size, digest_of_lfs, str(sibling.blob_id or ""))


def _require_verifiable(file: HubFile, hub_name: HubName) -> None:
    from huggingface_hub import constants

    if file.size < 0 or not (_SHA256.fullmatch(file.sha256) or (not file.sha256 and _SHA1.fullmatch(file.blob))):
        raise BackplaneError(
            f"{_endpoint()} states no size and digest of {file.name}, so that a download could not be verified; "
            "download it in another way and add its path"
        )
    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise BackplaneError(
            f"{file.name} has {size_text(file.size)}, and the hub offers files of more than "
            f"{size_text(constants.MAX_HTTP_DOWNLOAD_SIZE)} to its own program only; run 'hf download "
            f"{hub_name.repository} {file.name} --local-dir FOLDER', then add the path in that folder with --link"
        )


def _same(
    name: str, hub_name: HubName, commit: str, chosen: Sequence[HubFile], below: str, progress: Progress
) -> Entry | None:
    """Returns the model of this name if it is complete and has been downloaded from the same place."""
    if name not in entries.names():
        return None
    try:
        entry = entries.read(name)
    except BackplaneError:
        return None  # its manifest cannot be read: it is another model until it is replaced
    if (entry.source.repository, entry.source.commit) != (hub_name.repository, commit):
        return None
    expected = {file.name.removeprefix(below): file.size for file in chosen}
    if {file: one.size for file, one in entry.files.items()} != expected or entry.fault() is not None:
        return None
    progress.report(f"{name} was added before")
    return entry


def _prepare(name: str, hub_name: HubName, commit: str, chosen: Sequence[HubFile]) -> None:
    """Makes the folder of the download, with what an earlier one of the same files has left in it."""
    staged = entries.staging(name)
    plan = {"repository": hub_name.repository, "commit": commit, "files": [asdict(file) for file in chosen]}
    try:
        same = json.loads((staged / PLAN).read_text()) == plan
    except (OSError, ValueError, RecursionError):
        same = False
    if not same:
        entries.discard(name)
        (staged / entries.FILES).mkdir(mode=0o700, parents=True)
        staged.chmod(0o700)
        (staged / PLAN).write_text(json.dumps(plan))
    present = sum(one.stat().st_size for one in (staged / entries.FILES).rglob("*") if one.is_file())
    entries.require_space(sum(file.size for file in chosen) - present, f"downloading {hub_name}")


def _fetched(hub_name: HubName, commit: str, file: HubFile, target: Path, progress: Progress) -> str:
    """Downloads a file unless it is there, and returns its SHA-256, after comparing it with the hub's digest."""
    target.parent.mkdir(mode=0o700, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    if target.exists():
        target.rename(part)  # it was complete before the download of another file was interrupted
    resumed = _download(hub_name, commit, file, part, progress)
    verified = _has_digest(part, file, progress)
    if resumed and not verified:
        # What an earlier process has left may be damaged.
        progress.report(f"{file.name} does not have the hub's digest after it was continued; downloading it again")
        part.unlink()
        _download(hub_name, commit, file, part, progress)
        verified = _has_digest(part, file, progress)
    if not verified:
        part.unlink()
        raise BackplaneError(
            f"{file.name} of {hub_name.repository} is not the file whose digest {_endpoint()} states; it was removed. "
            "Try again; if that does not help, a proxy or a mirror (HF_ENDPOINT) changes it"
        )
    part.rename(target)
    return file.sha256 or digest(target, progress, f"verifying {file.name}")


def _download(hub_name: HubName, commit: str, file: HubFile, part: Path, progress: Progress) -> bool:
    """Downloads what is missing of a file. Returns whether a part of it was there already."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(hub_name.repository, file.name, revision=commit)
    opened = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "r+b") as stream:
        begin = stream.seek(0, os.SEEK_END)
        if begin > file.size:
            begin = stream.seek(0)
            stream.truncate()
        if begin < file.size:
            rest = f", {size_text(begin)} of it are here" if begin else ""
            progress.report(f"downloading {file.name} ({size_text(file.size)}{rest})")
        with progress.bar(file.name, file.size, begin) as advance, _own_bars(), _hub_errors(hub_name):
            here = begin
            while here < file.size:
                try:
                    http_get(
                        url,
                        _Counted(stream, file, advance),  # type: ignore[arg-type]  # it has what http_get calls
                        resume_size=here,
                        headers=build_hf_headers(),
                        displayed_filename=file.name,
                    )
                # Such as a reset connection, or an answer that is shorter than the hub announced; http_get itself
                # retries after others.
                except (http_library().ReadError, OSError) as fault:
                    before, here = here, stream.seek(0, os.SEEK_END)
                    if here <= before or (isinstance(fault, OSError) and not _ended_early(fault)):
                        raise
                else:
                    break
        stream.flush()
        os.fsync(opened)
    return begin > 0


def _ended_early(fault: OSError) -> bool:
    """Returns whether huggingface_hub has raised an error because it received less than was announced."""
    return type(fault) is OSError and fault.errno is None


class _Counted:
    """Wraps an open file and reports how many bytes are written. Refuses more than the file should have."""

    def __init__(self, stream: BinaryIO, file: HubFile, advance: Callable[[int], None]) -> None:
        self._stream, self._file, self._advance = stream, file, advance
        self.seek, self.tell = stream.seek, stream.tell

    def write(self, chunk: bytes) -> int:
        if self._stream.tell() + len(chunk) > self._file.size:
            raise BackplaneError(
                f"the hub sends more than the {self._file.size} bytes that it states for {self._file.name}; try again "
                "later, or check HF_ENDPOINT"
            )
        self._advance(len(chunk))
        return self._stream.write(chunk)

    def truncate(self) -> int:
        """Removes everything after the position: the hub has begun to send the file from there."""
        before = self._stream.seek(0, os.SEEK_CUR)
        end = os.fstat(self._stream.fileno()).st_size
        self._stream.truncate()
        self._advance(before - end)
        return before


def _has_digest(part: Path, file: HubFile, progress: Progress) -> bool:
    if part.stat().st_size != file.size:
        return False
    if file.sha256:
        return digest(part, progress, f"verifying {file.name}") == file.sha256
    content = part.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == file.blob


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


@contextmanager
def _own_bars() -> Iterator[None]:
    """Turns off the bars of huggingface_hub, unless the user has decided about them: this module has its own."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars("huggingface_hub.http_get")
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of each retry, in several lines
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _hub_errors(hub_name: HubName) -> Iterator[None]:
    """Turns the errors of huggingface_hub and of its HTTP library into errors of one line that name the remedy."""
    from huggingface_hub import errors

    repository, endpoint = hub_name.repository, _endpoint()
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise UsageError(
            f"HF_HUB_OFFLINE is set, so that {hub_name} cannot be downloaded; unset it, or add the path of a file"
        ) from None
    except errors.HFValidationError as fault:
        raise UsageError(f"{repository!r} is not the name of a repository ({fault}); check its spelling") from None
    except errors.GatedRepoError:
        raise BackplaneError(
            f"access to {repository} is restricted; accept its conditions on {endpoint}/{repository}, then set "
            "HF_TOKEN to a token of that account, or run 'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{endpoint} has no model {repository} that you may see; check the name (there is no such file or folder "
            "either), and set HF_TOKEN if the model is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(
            f"{repository} has no revision {hub_name.revision!r}; check it, or leave it out for the current one"
        ) from None
    except errors.HfHubHTTPError as fault:
        raise _refused(fault.response.status_code, hub_name, endpoint) from None
    except http_library().RequestError as fault:
        what = "does not answer in time" if "Timeout" in type(fault).__name__ else "cannot be reached"
        raise BackplaneError(
            f"{endpoint} {what} ({type(fault).__name__}: {fault}); check the network and HF_ENDPOINT, then run the "
            "same command again: what was downloaded is kept"
        ) from None
    except OSError as fault:
        if not _ended_early(fault):
            raise
        raise BackplaneError(
            f"{endpoint} has ended a transfer early; run the same command again: what was downloaded is kept"
        ) from fault
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:  # of parsing the answer
        raise BackplaneError(
            f"{endpoint} does not answer like a hub ({type(fault).__name__}: {short_repr(str(fault))}); check "
            "HF_ENDPOINT, and whether a proxy or a login page answers in its place"
        ) from fault


def _refused(status: int, hub_name: HubName, endpoint: str) -> BackplaneError:
    reasons = {
        401: "does not accept the token; set HF_TOKEN to a valid one, or run 'hf auth login'",
        403: "does not permit the download with this token; give it the permission to read the model",
        404: "has no such file; check the name",
        429: "has had too many requests from here; wait some minutes, or set HF_TOKEN for a higher limit",
    }
    reason = reasons.get(status, f"answers with the status {status}; try again later: what was downloaded is kept")
    return BackplaneError(f"{hub_name}: {endpoint} {reason}")
