"""Refuses the names of GGUF repositories of the Hugging Face Hub, with the commands that download a file.

Such a repository has one model in many quantizations, and Backplane serves a file. Without this check vLLM would raise
that a configuration or weights are missing.
"""

from __future__ import annotations

import logging
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

from vllm_backplane.errors import CheckpointError, short_repr
from vllm_backplane.gguf.model_files import has_other_weights, is_first_part

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only
_LISTED = 4
_REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<quantization>:[\w.-]+)?")
"""Repository names of the hub. Paths and the URLs that vLLM accepts (s3://...) do not match."""


def refuse_repository(model: str, revision: str | None = None, token: str | bool | None = None) -> None:
    """Raises `CheckpointError` if the repository `model` has GGUF files and no other weights.

    Only names that contain "gguf" are looked up. Where the hub cannot be reached, nothing is raised and vLLM goes on.
    """
    match = _REPOSITORY.fullmatch(model)
    if match is None or "gguf" not in model.lower() or Path(model).exists():
        return
    name, quantization = match["name"], match["quantization"]
    files = [] if quantization else _files(name, revision, token)
    served = [file for file in files if file.endswith(".gguf") and is_first_part(Path(file).name)]
    if not quantization and (not served or has_other_weights(files)):
        return
    more = f" and {len(served) - _LISTED} more" if len(served) > _LISTED else ""
    listed = f" ({', '.join(map(short_repr, served[:_LISTED]))}{more})" if served else ""
    wanted = f"{name}:{quantization[1:] if quantization else served[0]}"
    raise CheckpointError(
        f"{short_repr(model)} names GGUF files of the hub{listed}, and GGUF is served from a path; run 'vllm-backplane "
        f"serve {wanted}', which downloads the file, or 'vllm-backplane model add {wanted}' and then 'vllm-backplane "
        "model path' for its path"
    )


def _files(name: str, revision: str | None, token: str | bool | None) -> list[str]:
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(name, revision=revision, token=token)
    except (
        OSError,
        ValueError,
        http_library().RequestError,
    ) as fault:  # no network, no such name, no hub: vLLM reports it
        logger.debug("cannot list the files of %s on the hub: %s", name, fault)
        return []


def http_library() -> ModuleType:
    """Returns the HTTP library that the installed huggingface_hub uses: httpx, or since its version 2 httpx2.

    Requests that fail without an answer raise its `RequestError`.
    """
    from huggingface_hub.errors import HfHubHTTPError

    found = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError").__module__
    return import_module(found.partition(".")[0])
