"""Activates Backplane in every vLLM process: checks the platform, applies patches and binds layers.

vLLM loads this through the entry-point group of general plugins.
"""

from __future__ import annotations

import os

from vllm_backplane.errors import BackplaneError

_DEVICE_VARIABLE = "BACKPLANE_DEVICE"


def activate() -> None:
    """Applies patches and binds layers. vLLM calls this before it builds engine arguments, engines and workers.

    Does nothing if another platform is active. A second call does nothing.
    """
    if not _is_platform_active():
        return
    _declare_variables()
    from vllm_backplane.binding.registry import bind
    from vllm_backplane.patches import application
    from vllm_backplane.runtime import runtime
    from vllm_patchbay.patch import Process

    application.apply_patches(runtime().setting("patch_drift"), Process.PLATFORM, Process.ENGINE)
    bind()


def _declare_variables() -> None:
    """Adds Backplane's VLLM_* variable to vLLM's table; vLLM warns of variables outside of it, or rejects them."""
    from vllm import envs

    from vllm_patchbay.upstream.versions import VERSION_VARIABLE

    envs.environment_variables[VERSION_VARIABLE] = lambda: os.environ.get(VERSION_VARIABLE)


def _is_platform_active() -> bool:
    """Returns whether vLLM runs on Backplane's platform.

    vLLM can skip a platform plugin silently. If the user requested a Backplane device, that is an error; otherwise a
    warning is logged, and vLLM stays unchanged.
    """
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
    problem = f"vLLM runs on {type(current_platform).__name__} although vllm-backplane is installed: {cause}"
    if device := os.environ.get(_DEVICE_VARIABLE):
        raise BackplaneError(
            f"{_DEVICE_VARIABLE}={device} requests a device of Backplane, but {problem}; or unset {_DEVICE_VARIABLE}."
        )
    from vllm.logger import init_logger

    logger = init_logger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only
    logger.warning_once("%s; set VLLM_PLUGINS='' to run without Backplane and without this warning.", problem)
    return False
