"""Applies the patches of a process when the process starts, and reports them.

`vllm_backplane.platform` calls `apply_patches` when vLLM chooses the platform, the general plugin calls it again when
vLLM loads plugins, and the worker calls it when it starts. With fork, the engine's process inherits the applied
patches. With spawn, it applies them itself, because vLLM loads the platform and the plugins in every spawned process.
The engine is thus patched without a replacement of its class.
"""

from __future__ import annotations

from functools import cache

from vllm_backplane.patches import OWN, packages
from vllm_patchbay.patch import PatchSession, PatchSet, Process


@cache
def patches() -> PatchSet:
    """Returns all patches, Backplane's own first."""
    return PatchSet.of_packages(packages(), defer_features=True, may_be_empty=(OWN,)).require_complete()


@cache
def session() -> PatchSession:
    """Returns the patch session of this process."""
    return PatchSession.for_installed_vllm(drift_setting="BACKPLANE_PATCH_DRIFT=warn")


def apply_patches(drift: str, *processes: Process) -> None:
    """Applies the patches for `processes` to this process. Does nothing if there are no patches."""
    if not patches():
        return
    session().drift = drift
    for process in processes:
        session().apply(patches(), process)


def status_line() -> str:
    """Returns a log line with the status of each patch in this process, or an empty string if there are no patches.

    vLLM configures logging after it chooses the platform, so messages logged while patches are applied may be lost.
    """
    if not patches():
        return ""
    return f"Patches of vLLM: {', '.join(session().summary()) or 'none so far'}."
