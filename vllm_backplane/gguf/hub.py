"""Names of the hub's GGUF repositories, which have a model in many forms: they are refused, with what to do.

vLLM would say that a configuration, or weights, are missing.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from vllm_backplane.errors import CheckpointError, shown
from vllm_backplane.gguf.model_files import has_other_weights, is_first, parts_of

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only
_NAMED = 4
_REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<form>:[\w.-]+)?")
"""As the hub writes them; paths, and addresses of stores that vLLM reads (s3://...), are none."""


def refuse_repository(model: str, revision: str | None = None, token: str | bool | None = None) -> None:
    """Where the hub says that `model` has GGUF files and no other weights. It is asked only of names with "gguf" in
    them, and where it cannot be asked, vLLM goes on."""
    match = _REPOSITORY.fullmatch(model)
    if match is None or "gguf" not in model.lower() or Path(model).exists():
        return
    name, form = match["name"], match["form"]
    files = [] if form else _files(name, revision, token)
    served = [file for file in files if file.endswith(".gguf") and is_first(Path(file).name)]
    if not form and (not served or has_other_weights(files)):
        return
    more = f" and {len(served) - _NAMED} more" if len(served) > _NAMED else ""
    listed = f" ({', '.join(map(shown, served[:_NAMED]))}{more})" if served else ""
    raise CheckpointError(
        f"{shown(model)} names GGUF files of the hub{listed}, and GGUF is served from a path; fetch one of them "
        f"(hf download {name} {_wanted(served)}) and give its path, or that of the first part"
    )


def _wanted(served: list[str]) -> str:
    """Of one that is a single file, if there is one; of parts, all."""
    whole = [file for file in served if parts_of(file) is None]
    if whole or not served:
        return whole[0] if whole else "FILE.gguf"
    return f"--include '{parts_of(served[0])}'"


def _files(name: str, revision: str | None, token: str | bool | None) -> list[str]:
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(name, revision=revision, token=token)
    except (OSError, ValueError, HTTPError) as fault:  # no network, no such name, a hub of another kind: vLLM says it
        logger.debug("the hub could not be asked what %s has: %s", name, fault)
        return []
