"""What the general plugin does in every vLLM process: see whether the platform is ours, patch, bind the layers."""

from __future__ import annotations

import os

from vllm_backplane.errors import BackplaneError

_ASKED = "BACKPLANE_DEVICE"


def activate() -> None:
    """Called by vLLM before it builds engine arguments, engines and workers; may be called twice.

    Does nothing where another platform is active.
    """
    if not _platform_is_ours():
        return
    _declare_variables()
    from vllm_backplane.binding.registry import bind
    from vllm_backplane.patches import lifecycle
    from vllm_backplane.runtime import runtime
    from vllm_patchbay.patch import Process

    lifecycle.start(runtime().setting("patch_drift"), Process.PLATFORM, Process.ENGINE)
    bind()


def _declare_variables() -> None:
    """vLLM warns of a VLLM_* variable that is not in its table, or refuses it where it was told to."""
    from vllm import envs

    from vllm_patchbay.upstream.versions import VERSION_VARIABLE

    envs.environment_variables[VERSION_VARIABLE] = lambda: os.environ.get(VERSION_VARIABLE)


def _platform_is_ours() -> bool:
    """vLLM can pass over a platform plugin without a word: whoever asked for a device gets an error, others a line in
    the log, and vLLM is left as it is."""
    from vllm.platforms import current_platform

    if getattr(type(current_platform), "is_backplane", False):
        return True
    target = os.environ.get("VLLM_TARGET_DEVICE")
    cause = (
        f"VLLM_TARGET_DEVICE={target} is set, which makes vLLM ignore every out-of-tree platform. "
        "Unset it (it is only for building vLLM)"
        if target
        else "vLLM did not activate the platform plugin 'backplane'. Run 'vllm-backplane doctor'"
    )
    told = f"vLLM runs on {type(current_platform).__name__} although vllm-backplane is installed: {cause}"
    if asked := os.environ.get(_ASKED):
        raise BackplaneError(f"{_ASKED}={asked} asks for a device of Backplane, and {told}; or unset {_ASKED}.")
    from vllm.logger import init_logger

    logger = init_logger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only
    logger.warning_once("%s; set VLLM_PLUGINS='' to run without Backplane and this line.", told)
    return False
