"""When this process applies which patches.

`vllm_backplane.platform` calls `start` when vLLM chooses the platform, the general plugin calls it again when vLLM
loads plugins, and the worker when it starts. Under fork the engine's process inherits what was applied; under spawn it
comes by here itself, because vLLM loads platform and plugins in every process it spawns. That is how the engine is
reached without replacing its class.
"""

from __future__ import annotations

from functools import cache

from vllm_backplane.patches import OWN, packages
from vllm_patchbay.patch import PatchSession, PatchSet, Process


@cache
def patches() -> PatchSet:
    return PatchSet.of_packages(packages(), leave_features=True, may_be_empty=(OWN,)).whole()


@cache
def session() -> PatchSession:
    return PatchSession.for_installed_vllm(drift_setting="BACKPLANE_PATCH_DRIFT=warn")


def start(drift: str, *processes: Process) -> None:
    """Apply the patches of these processes to this one. Nothing happens where there are none."""
    if not patches():
        return
    session().drift = drift
    for process in processes:
        session().apply(patches(), process)


def report() -> str:
    """One line for the log: what was decided of each patch in this process; empty where there are none.

    vLLM sets its logging up after the platform, so what is logged while patches are applied may not be seen.
    """
    if not patches():
        return ""
    return f"Patches of vLLM: {', '.join(session().summary()) or 'none so far'}."
