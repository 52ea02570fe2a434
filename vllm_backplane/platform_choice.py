"""Decides whether Backplane becomes the platform of vLLM in this process.

Backplane takes over where vLLM would otherwise run on a CPU or on nothing. It yields to a platform plugin of another
distribution and to an accelerator for which this vLLM is built, unless the user asked for Backplane. vLLM asks every
process, so the decision depends only on what all processes have in common: the environment, the installed
distributions and the machine. Nothing here imports PyTorch or a device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec

DEVICE_VARIABLE = "BACKPLANE_DEVICE"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
COMMAND_VARIABLE = "BACKPLANE_COMMAND"
"""Set by `vllm-backplane serve`, for its own process and those that vLLM starts."""
GROUP, NAME, PACKAGE = "vllm.platform_plugins", "backplane", "vllm_backplane"

KERNELS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("vllm._C_stable_libtorch", "vllm._C"),
    "rocm": ("vllm._C_stable_libtorch", "vllm._C"),
    "xpu": ("vllm_xpu_kernels",),
    "tpu": ("tpu_inference",),
}
"""Modules by accelerator. A vLLM that serves it has at least one of them. A vLLM built for no device has none."""

HOW_TO_CHOOSE = f"To use Backplane, run 'vllm-backplane serve', set {DEVICE_VARIABLE}, or name it in {PLUGINS_VARIABLE}"


@dataclass(frozen=True, slots=True)
class Decision:
    """States whether Backplane is the platform, and why."""

    activates: bool
    reason: str


_deciding = False
failures: dict[str, str] = {}
"""Errors of platform plugins, vLLM's own included, that raised when they were asked, by the name of the plugin."""


@cache
def decision() -> Decision:
    """Returns the decision for this process. It is made once."""
    return decide(os.environ)


def decide(environment: Mapping[str, str]) -> Decision:
    """Returns whether Backplane becomes the platform. It calls the other platform plugins, as vLLM does."""
    global _deciding
    if asked := requested_by(environment):
        return Decision(True, asked)
    if _deciding:
        return Decision(False, "another platform plugin queried this decision while it was being made")
    _deciding = True
    try:
        if other := active_plugin(environment):
            return Decision(False, f"the platform plugin {other.name!r} of {other.distribution} is active")
        if accelerator := working_accelerator():
            return Decision(False, f"this vLLM serves the machine's accelerator ({accelerator}) itself")
    finally:
        _deciding = False
    return Decision(True, "no accelerator that this vLLM serves, and no other platform plugin")


def requested_by(environment: Mapping[str, str]) -> str | None:
    """Returns how the user asked for Backplane, such as "requested by BACKPLANE_DEVICE=cpu", or None."""
    if environment.get(DEVICE_VARIABLE):
        return f"requested by {DEVICE_VARIABLE}={environment[DEVICE_VARIABLE]}"
    if environment.get(COMMAND_VARIABLE):
        return f"requested by 'vllm-backplane {environment[COMMAND_VARIABLE]}'"
    if NAME in environment.get(PLUGINS_VARIABLE, "").split(","):
        return f"requested by {PLUGINS_VARIABLE}={environment[PLUGINS_VARIABLE]}"
    return None


@dataclass(frozen=True, slots=True)
class OtherPlugin:
    """Names a platform plugin and its distribution."""

    name: str
    distribution: str


def active_plugin(environment: Mapping[str, str]) -> OtherPlugin | None:
    """Returns a platform plugin of another distribution that activates itself, or None."""
    allowed = environment[PLUGINS_VARIABLE].split(",") if PLUGINS_VARIABLE in environment else None
    for plugin in entry_points(group=GROUP):
        if plugin.value.partition(":")[0].partition(".")[0] == PACKAGE or (
            allowed is not None and plugin.name not in allowed
        ):
            continue
        if _detects(plugin.name, lambda plugin=plugin: plugin.load()()):  # type: ignore[misc]
            return OtherPlugin(plugin.name, plugin.dist.name if plugin.dist else "an unknown distribution")
    return None


def working_accelerator() -> str | None:
    """Returns vLLM's name of an accelerator that it detects and has kernels for, or None."""
    from vllm import platforms

    for name, detect in platforms.builtin_platform_plugins.items():
        if detect is not platforms.cpu_platform_plugin and _detects(name, detect) and _has_kernels(name):
            return name
    return None


def _detects(name: str, detect: Callable[[], object]) -> bool:
    """Returns whether a platform plugin activates itself. One that raises does not: vLLM goes on without it.

    vLLM calls the same function, and logs the exception at the same level. 'vllm-backplane doctor' reports it, from
    `failures` or from its own check of each plugin.
    """
    try:
        return detect() is not None
    except Exception as fault:
        failures[name] = f"{type(fault).__name__}: {fault}"
        logging.getLogger("vllm." + __name__).debug("A platform plugin failed during detection.", exc_info=True)
        return False


def _has_kernels(accelerator: str) -> bool:
    names = KERNELS.get(accelerator)
    return names is None or any(find_spec(name) is not None for name in names)
