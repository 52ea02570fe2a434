"""Checks a name of the Hugging Face Hub: in the local cache, or else at the hub itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vllm_backplane.early_checks.vllm_options import Given
from vllm_backplane.errors import UsageError, short_repr

SECONDS = 3.0
"""Time within which the hub must accept a connection."""
_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")


def check_name(name: str, options: Given, hint: str) -> None:
    """Raises UsageError if a name is neither in the cache nor at the hub, or if the hub cannot be reached.

    `hint` ends the sentence where the name may be misspelt. What else may go wrong at the hub is left to vLLM.
    """
    if not _NAME.fullmatch(name) or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    from huggingface_hub import constants

    if _is_cached(name, [constants.HF_HUB_CACHE, options.get("--download-dir")]):
        return
    nothing = f"{short_repr(name)} is not a bundled model, not a folder and not in the cache of the hub"
    if constants.HF_HUB_OFFLINE:
        offline = next((each for each in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(each)), "offline")
        raise UsageError(f"{nothing}, and {offline} forbids to look it up{_or(hint, f'; unset {offline} to download')}")
    _ask(name, options, nothing, hint)


def _or(hint: str, remedy: str) -> str:
    return hint if hint != "." else remedy


def _is_cached(name: str, folders: list[str | None]) -> bool:
    snapshots = f"models--{name.replace('/', '--')}/snapshots"
    return any(any(Path(folder, snapshots).glob("*/*")) for folder in folders if folder)


def _ask(name: str, options: Given, nothing: str, hint: str) -> None:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    host = constants.ENDPOINT.partition("://")[2]
    token = options.get("--hf-token")
    try:
        HfApi().model_info(
            name,
            revision=options.get("--revision"),
            timeout=SECONDS,
            token=token if isinstance(token, str) else None,
        )
    except GatedRepoError:
        raise UsageError(
            f"{name} needs permission; accept its terms at {constants.ENDPOINT}/{name}, and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise UsageError(
            f"{name} has no revision {short_repr(options.get('--revision'))} at {host}; correct --revision"
        ) from None
    except RepositoryNotFoundError:
        remedy = "; correct the name, or set HF_TOKEN if the model is private"
        raise UsageError(f"{nothing}, and {host} has no such model{_or(hint, remedy)}") from None
    except HFValidationError:
        raise UsageError(f"{nothing}, and no model of the hub can have that name{_or(hint, '; correct it')}") from None
    except HfHubHTTPError:
        return  # the hub answers, with an error that may be over when vLLM asks
    except Exception as fault:  # the library of huggingface_hub for HTTP differs between its releases
        if not _is_of_network(fault):
            raise
        reason = str(fault) or type(fault).__name__
        remedy = "; check the network, or give the path of a model"
        raise UsageError(f"{nothing}, and {host} cannot be reached ({reason}){_or(hint, remedy)}") from None


def _is_of_network(fault: Exception) -> bool:
    return isinstance(fault, OSError) or any(base.__name__ == "TransportError" for base in type(fault).__mro__)
