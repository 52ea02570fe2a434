"""Checks a name of the Hugging Face Hub: in the local cache, or else at the hub itself."""

from __future__ import annotations

import errno
import glob
import os
import re
import socket
import threading
from typing import Any

from vllm_backplane.early_checks.vllm_options import Given
from vllm_backplane.errors import UsageError, short_repr

SECONDS = 3.0
"""Time for the answer of the hub. Without one by then, the model is left to vLLM."""
_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")


def check_name(name: str, options: Given, hint: str) -> None:
    """Raises UsageError if a name is neither in the cache nor at the hub, or if no connection to the hub is possible.

    `hint` ends the sentence where the name may be misspelt. What else may go wrong at the hub is left to vLLM.
    """
    if not _NAME.fullmatch(name) or os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
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
    snapshots = f"models--{name.replace('/', '--')}/snapshots/*/*"
    return any(glob.glob(os.path.join(glob.escape(folder), snapshots)) for folder in folders if folder)


def _ask(name: str, options: Given, nothing: str, hint: str) -> None:
    """Raises the refusal if the hub's answer is one and comes in time.

    A thread waits for the answer, because the lookup of an address has no time limit and does not end at Ctrl-C.
    """
    from huggingface_hub import HfApi

    answers: list[UsageError | None] = []
    api = HfApi()
    request = threading.Thread(target=lambda: answers.append(_refusal(api, name, options, nothing, hint)), daemon=True)
    request.start()
    request.join(SECONDS)
    if answers and answers[0] is not None:
        raise answers[0]


def _refusal(api: Any, name: str, options: Given, nothing: str, hint: str) -> UsageError | None:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    host = constants.ENDPOINT.partition("://")[2]
    token, revision = options.get("--hf-token"), options.get("--revision")
    try:
        api.model_info(name, revision=revision, timeout=SECONDS, token=token if isinstance(token, str) else None)
    except GatedRepoError:
        return UsageError(f"{name} needs permission; accept its terms at {constants.ENDPOINT}/{name}, and set HF_TOKEN")
    except RevisionNotFoundError:
        return UsageError(f"{name} has no revision {short_repr(revision)} at {host}; correct --revision")
    except RepositoryNotFoundError:
        remedy = "; correct the name, or set HF_TOKEN if the model is private"
        return UsageError(f"{nothing}, and {host} has no such model{_or(hint, remedy)}")
    except HFValidationError:
        return UsageError(f"{nothing}, and no model of the hub can have that name{_or(hint, '; correct it')}")
    except Exception as fault:  # an error of the hub, or an answer too late, may be over when vLLM asks
        if _is_unreachable(fault):
            reason = str(fault) or type(fault).__name__
            remedy = "; check the network, or give the path of a model"
            return UsageError(f"{nothing}, and {host} cannot be reached ({reason}){_or(hint, remedy)}")
    return None


def _is_unreachable(fault: BaseException | None) -> bool:
    """Returns whether the system refused the connection, had no route to the hub, or found no address for it."""
    while fault is not None:  # the libraries for HTTP wrap the error of the system
        if isinstance(fault, (ConnectionRefusedError, socket.gaierror)):
            return True
        if isinstance(fault, OSError) and fault.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return True
        fault = fault.__cause__ or fault.__context__
    return False
