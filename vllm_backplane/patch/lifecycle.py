"""When this process applies which patches.

`vllm_backplane.platform` calls `start` when vLLM chooses the platform, the general plugin calls it again when vLLM
loads plugins, and the worker when it starts. Under fork the engine's process inherits what was applied; under spawn it
comes by here itself, because vLLM loads platform and plugins in every process it spawns. That is how the engine is
reached without replacing its class.
"""

from __future__ import annotations

from functools import cache

from vllm_backplane.patch.application import Theatre
from vllm_backplane.patch.collection import PatchSet
from vllm_backplane.patch.declaration import Process
from vllm_backplane.upstream import SymbolIndex, installed_tree, installed_version


@cache
def patches() -> PatchSet:
    return PatchSet.installed(leave_features=True).whole()


@cache
def theatre() -> Theatre:
    return Theatre(cache(lambda: SymbolIndex(installed_tree())), str(installed_version()))


def start(drift: str, *processes: Process) -> None:
    """Apply the patches of these processes to this one. Nothing happens where there are none."""
    if not patches():
        return
    theatre().drift = drift
    for process in processes:
        theatre().apply(patches(), process)


def report() -> str:
    """One line for the log: what was decided of each patch in this process; empty where there are none.

    vLLM sets its logging up after the platform, so what is logged while patches are applied may not be seen.
    """
    if not patches():
        return ""
    return f"Patches of vLLM: {', '.join(theatre().told()) or 'none so far'}."
