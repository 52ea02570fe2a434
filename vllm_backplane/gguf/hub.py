"""Refuses the names of GGUF repositories of the Hugging Face Hub, with the command that downloads a file.

Such a repository has one model in many quantizations, and Backplane serves a file. Without this check vLLM would raise
that a configuration or weights are missing.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from vllm_backplane.errors import CheckpointError, short_repr
from vllm_backplane.gguf.model_files import has_other_weights, is_first_part, part_pattern

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
    raise CheckpointError(
        f"{short_repr(model)} names GGUF files of the hub{listed}, and GGUF is served from a path; download one of "
        f"them (hf download {name} {_download_arguments(served)}) and give its path, or that of the first part"
    )


def _download_arguments(served: list[str]) -> str:
    """Returns the arguments of `hf download` for a file that is not split, if there is one, otherwise for all parts."""
    whole = [file for file in served if part_pattern(file) is None]
    if whole or not served:
        return whole[0] if whole else "FILE.gguf"
    return f"--include '{part_pattern(served[0])}'"


def _files(name: str, revision: str | None, token: str | bool | None) -> list[str]:
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(name, revision=revision, token=token)
    except (OSError, ValueError, HTTPError) as fault:  # no network, no such name, another kind of hub: vLLM reports it
        logger.debug("cannot list the files of %s on the hub: %s", name, fault)
        return []
