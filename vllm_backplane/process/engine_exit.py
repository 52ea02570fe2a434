"""Shuts engines down when the program of a user ends, before Python waits for their processes.

vLLM leaves that to `weakref.finalize`, whose objects run when the interpreter exits. Python's `multiprocessing` waits
for child processes then too, without a limit. Which of the two comes first depends on which of them the program used
first: a program that has used a temporary folder before it imports vLLM would never end.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import sys

from vllm_backplane.guards import guarded

_CLIENTS = "vllm.v1.engine.core_client"


@guarded(
    "vllm.v1.engine.core_client:EngineCoreClient.shutdown",
    why="objects of the class are found in memory, and shut down at exit",
)
def shut_engines_down_at_exit() -> None:
    """Registers the shutdown in a process that is not itself a child of vLLM. `multiprocessing` must be imported."""
    if multiprocessing.parent_process() is None:
        atexit.register(_shut_down)  # exit functions run in reverse order, so this one precedes that of multiprocessing


def _shut_down() -> None:
    clients = sys.modules.get(_CLIENTS)
    if clients is None or not multiprocessing.active_children():
        return
    gc.unfreeze()  # the collector does not list objects that a program has frozen
    for found in gc.get_objects():
        if issubclass(type(found), clients.EngineCoreClient):
            found.shutdown()
