"""Names of the hub's GGUF repositories, which have a model in many forms: they are refused, with what to do.

vLLM would say that a configuration, or weights, are missing.
"""

from __future__ import annotations

from pathlib import Path

from vllm_backplane.errors import CheckpointError, shown
from vllm_backplane.gguf.parts import has_other_weights

_NAMED = 4


def refuse_repository(model: str, revision: str | None = None, token: str | bool | None = None) -> None:
    """Where the hub says that `model` has GGUF files and no other weights. It is asked only of names with "gguf" in
    them, and where it cannot be asked, vLLM goes on."""
    if "gguf" not in model.lower() or Path(model).exists():
        return
    name, colon, _form = model.partition(":")
    files = [] if colon else _files(name, revision, token)
    served = [file for file in files if file.endswith(".gguf")]
    if not colon and (not served or has_other_weights(files)):
        return
    more = f" and {len(served) - _NAMED} more" if len(served) > _NAMED else ""
    listed = f" ({', '.join(map(shown, served[:_NAMED]))}{more})" if served else ""
    raise CheckpointError(
        f"{shown(model)} names GGUF files of the hub{listed}, and GGUF is served from a path; fetch one of them "
        f"(hf download {name} {served[0] if served else 'FILE.gguf'}) and give the path that this prints"
    )


def _files(name: str, revision: str | None, token: str | bool | None) -> list[str]:
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(name, revision=revision, token=token)
    except Exception:  # no network, no such name, a hub of another kind: vLLM says it
        return []
