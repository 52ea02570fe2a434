"""What the general plugin does in every vLLM process: see that the platform is ours, patch, bind the layers."""

from __future__ import annotations

import os

from vllm_backplane.errors import BackplaneError


def activate() -> None:
    """Called by vLLM before it builds engine arguments, engines and workers; may be called twice."""
    _insist_on_platform()
    _declare_variables()
    from vllm_backplane.layers.binding import bind
    from vllm_backplane.patch import Process, lifecycle
    from vllm_backplane.runtime import runtime

    lifecycle.start(runtime().setting("patch_drift"), Process.PLATFORM, Process.ENGINE)
    bind()


def _declare_variables() -> None:
    """vLLM warns of a VLLM_* variable that is not in its table, or refuses it where it was told to."""
    from vllm import envs

    from vllm_backplane.upstream.versions import VERSION_VARIABLE

    envs.environment_variables[VERSION_VARIABLE] = lambda: os.environ.get(VERSION_VARIABLE)


def _insist_on_platform() -> None:
    """vLLM can pass over a platform plugin without a word; running elsewhere unnoticed is the worst outcome."""
    from vllm.platforms import current_platform

    if getattr(type(current_platform), "is_backplane", False):
        return
    target = os.environ.get("VLLM_TARGET_DEVICE")
    cause = (
        f"VLLM_TARGET_DEVICE={target} is set, which makes vLLM ignore every out-of-tree platform. "
        "Unset it (it is only for building vLLM)"
        if target
        else "vLLM did not activate the platform plugin 'backplane'. Run 'vllm-backplane doctor'"
    )
    raise BackplaneError(
        f"vLLM runs on {type(current_platform).__name__} although vllm-backplane is installed: {cause}; "
        "or set VLLM_PLUGINS='' to run without Backplane on purpose."
    )
