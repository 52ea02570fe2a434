"""Activates Backplane in every vLLM process: checks the platform, applies patches and binds layers.

vLLM loads this through the entry-point group of general plugins.
"""

from __future__ import annotations

import logging
import os

from vllm_backplane.errors import BackplaneError
from vllm_backplane.platform_choice import HOW_TO_CHOOSE, decision, requested_by

_LOGGED = "_BACKPLANE_LOGGED_THAT_IT_IS_NOT_USED"
"""Environment variable that the processes inherit which vLLM starts later."""


def activate() -> None:
    """Applies patches and binds layers. vLLM calls this before it builds engine arguments, engines and workers.

    Does nothing if another platform is active. A second call does nothing.
    """
    if not _is_platform_active():
        return
    from vllm_backplane.binding.registry import bind
    from vllm_backplane.patches import application
    from vllm_backplane.runtime import runtime
    from vllm_backplane.settings import compat
    from vllm_patchbay.patch import Process

    compat.declare_variables()
    application.apply_patches(runtime().setting("patch_drift"), Process.PLATFORM, Process.ENGINE)
    bind()


def _is_platform_active() -> bool:
    """Returns whether vLLM runs on Backplane's platform.

    If the user asked for Backplane, another platform is an error. Otherwise the reason is logged once, and vLLM stays
    unchanged.
    """
    from vllm.platforms import current_platform

    if getattr(type(current_platform), "is_backplane", False):
        return True
    remedy = "Run 'vllm-backplane doctor'"
    if target := os.environ.get("VLLM_TARGET_DEVICE"):
        cause = f"VLLM_TARGET_DEVICE={target} is set, which makes vLLM ignore every out-of-tree platform"
        remedy = "Unset VLLM_TARGET_DEVICE (it is only for building vLLM)"
    elif not decision().activates:
        cause = decision().reason
    else:
        cause = "vLLM did not activate the platform plugin 'backplane'"
    platform = type(current_platform).__name__
    if asked := requested_by(os.environ):
        raise BackplaneError(
            f"Backplane is {asked}, but vLLM runs on {platform}: {cause}. {remedy}, or remove the request."
        )
    _log_once(f"Backplane is installed and not used: {cause}. {HOW_TO_CHOOSE}.")
    return False


def _log_once(message: str) -> None:
    """Logs a message in the first process of vLLM whose log is enabled: under a script, that of the engine."""
    from vllm.logger import init_logger

    logger = init_logger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only
    if logger.isEnabledFor(logging.INFO) and _LOGGED not in os.environ:
        os.environ[_LOGGED] = "1"
        logger.info(message)
