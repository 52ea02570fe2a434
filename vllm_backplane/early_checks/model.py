"""Checks that the model that was named exists and can be a model: a folder, a GGUF file, or a name of the hub."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from vllm_backplane.early_checks import hub
from vllm_backplane.early_checks.vllm_options import Given
from vllm_backplane.errors import UsageError, nearest, short_repr

MAGIC = b"GGUF"
CONFIGURATIONS = ("config.json", "params.json")
"""Files of which a folder in the format of Hugging Face, or of Mistral, has one."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
OWN_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral", "gguf", "backplane_shared")
"""Load formats that read weights from a folder in the usual form."""
_PATTERNS = ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt")
"""Weights in the order in which vLLM looks for them. It opens the first kind that is there."""
_FEWER_PATTERNS = {"hf": _PATTERNS[1:], "safetensors": _PATTERNS[1:2], "mistral": _PATTERNS[:1], "pt": _PATTERNS[3:]}
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Files of a training, which vLLM does not open."""
_LFS = b"version https://git-lfs"
_SHOWN = 5


def check_model(given: str, options: Given, prepared: Collection[str]) -> None:
    """Raises UsageError if nothing can be served under this name. `prepared` are names that it may be a misspelling
    of."""
    if "://" in given or options.get("--load-format") not in (None, *OWN_FORMATS):
        return  # storage and loaders of other kinds, which read names of their own
    path = Path(given)
    try:
        exists = path.exists()
    except (OSError, ValueError) as fault:  # a name that is too long, or has a character that no path has
        reason = getattr(fault, "strerror", None) or fault
        raise UsageError(f"{short_repr(given)} cannot be a model: {reason}; give a path or a name") from None
    if exists:
        _check_path(path, options)
    elif _is_path(given):
        raise UsageError(_about_missing(given))
    else:
        hub.check_name(given, options, hint=_about_name(given, prepared))


def _is_path(given: str) -> bool:
    """Returns whether a text can only be meant as a path: names of the hub have at most one slash."""
    return given.startswith((".", "/", "~")) or given.count("/") > 1 or given.endswith(("/", ".gguf"))


def _about_name(given: str, prepared: Collection[str]) -> str:
    """Returns the end of a sentence about a name that nothing has: a prepared model or a folder of a similar name."""
    found = nearest(given, prepared)
    if found != ".":
        return found
    path = Path(given)
    return nearest(path.name, _names_in(path.parent)) if path.parent != Path() else "."


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _about_missing(given: str) -> str:
    path = Path(given)
    if given.startswith("~"):
        return f"{given} does not exist; the shell replaces ~ only at the beginning of an argument without quotes"
    if os.path.islink(path):
        return f"{given} is a link to {os.readlink(path)}, which does not exist; correct the link"
    there = next((parent for parent in path.parents if parent.exists()), Path())
    if there != path.parent:
        return f"{given} does not exist, nor does {path.parent}; correct the path ({there} exists)"
    match = nearest(path.name, _names_in(path.parent))
    return f"{given} does not exist{match if match != '.' else '; give the folder or the GGUF file of a model'}"


def _check_path(path: Path, options: Given) -> None:
    try:
        if path.is_dir():
            _check_folder(path, options)
        else:
            _check_file(path)
    except OSError as fault:
        raise UsageError(
            f"{fault.filename or path} cannot be read: {fault.strerror}; change its permissions, or give another model"
        ) from None


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"{path} is neither a folder nor a file; give the folder or the GGUF file of a model")
    with path.open("rb") as file:
        first = file.read(64)
    if first.startswith(MAGIC):
        return
    if not first:
        raise UsageError(f"{path} is empty; download the model again")
    if first.startswith(_LFS):
        raise UsageError(f"{path} is a pointer of Git LFS and not the file itself; run 'git lfs pull' in its folder")
    if any((path.parent / name).is_file() for name in CONFIGURATIONS):
        raise UsageError(f"{path} is one file of a model; give its folder: {path.parent}")
    raise UsageError(
        f"{path} is not a GGUF file (it begins with {short_repr(first[:8])}); give a GGUF file or a folder"
    )


def _check_folder(folder: Path, options: Given) -> None:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        raise UsageError(f"the folder {folder} is empty; give the folder of a model, or download the model again")
    if any(name.endswith(".gguf") for name in names):
        return
    if options.get("--config-format") is None and options.get("--hf-config-path") is None:
        _check_configuration(folder, names)
    for file in loaded_files(folder, options):
        _check_weights(file)
    if not any(file.name.endswith(WEIGHTS) for file in _files_below(folder)):
        raise UsageError(
            f"the folder {folder} has no weights (*.safetensors, *.bin, *.gguf); download the model again, or add "
            "--load-format dummy for random ones"
        )


def loaded_files(folder: Path, options: Given) -> list[Path]:
    """Returns the weights in a folder that vLLM opens, apart from GGUF files; none if their index cannot be read."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    for pattern in _FEWER_PATTERNS.get(options.get("--load-format"), _PATTERNS):
        if found := fnmatch.filter(names, pattern):
            break
    else:
        return []
    index = folder / f"{'consolidated' if pattern == _PATTERNS[0] else 'model'}.safetensors.index.json"
    if pattern.endswith(".safetensors") and index.is_file():
        try:
            indexed = set(json.loads(index.read_bytes())["weight_map"].values())
        except (RecursionError, ValueError, KeyError, TypeError, AttributeError):
            return []
        found = [name for name in found if name in indexed]
    return [folder / name for name in found if not name.endswith(_OF_TRAINING)]


def _check_configuration(folder: Path, names: list[str]) -> None:
    if not any(name in names for name in CONFIGURATIONS):
        if "adapter_config.json" in names:
            raise UsageError(
                f"the folder {folder} is a LoRA adapter; serve its base model and add --enable-lora "
                f"--lora-modules NAME={folder}"
            )
        below = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and (entry / "config.json").is_file()]
        where = f"; did you mean {below[0]}?" if below else f"; it has {_listed(names)}"
        raise UsageError(f"the folder {folder} is not a model: it has no config.json and no GGUF file{where}")
    file = folder / CONFIGURATIONS[0]
    if CONFIGURATIONS[0] not in names:
        return
    try:
        content = json.loads(file.read_bytes())
    except (RecursionError, ValueError) as fault:  # UnicodeDecodeError is a ValueError
        raise UsageError(f"{file} is not JSON: {fault}; download the model again") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a JSON object; download the model again")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _check_weights(file: Path) -> None:
    if not file.exists():  # a link to a file that is gone
        raise UsageError(f"{file} is a link to a file that does not exist; download the model again")
    if file.stat().st_size > 1024:
        return
    first = file.read_bytes()
    if not first:
        raise UsageError(f"{file} is empty; download the model again")
    if first.startswith(_LFS):
        raise UsageError(f"{file} is a pointer of Git LFS and not the file itself; run 'git lfs pull' in its folder")


def _files_below(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)
