"""Checks which sockets a forked engine process keeps, and that other forked processes keep all."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import multiprocessing, os, socket, sys
from vllm_backplane.process.forked_sockets import release_sockets_in_engines

def look(results):
    names = {}
    for name, held in sockets.items():
        try:
            names[name] = held.getsockname() is not None
        except OSError:
            names[name] = False
    results.put(names)

release_sockets_in_engines()
release_sockets_in_engines()
bound, listening, unbound = (socket.socket() for _ in range(3))
bound.bind(("127.0.0.1", 0))
listening.bind(("127.0.0.1", 0))
listening.listen()
connected = socket.create_connection(listening.getsockname())
accepted, _ = listening.accept()
datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
pair, other = socket.socketpair()
sockets = dict(bound=bound, listening=listening, unbound=unbound, connected=connected, accepted=accepted,
               datagrams=datagrams, pair=pair)
context = multiprocessing.get_context("fork")
results = context.Queue()
child = context.Process(target=look, args=(results,), name=sys.argv[1])
child.start()
kept = results.get(timeout=300)
child.join()
print(*sorted(name for name in kept if kept[name]))
assert listening.getsockname()[1], "the parent keeps its own"
"""

OTHERS = {"unbound", "connected", "accepted", "datagrams", "pair"}


@pytest.mark.parametrize(
    ("process", "kept"),
    [
        ("EngineCore", OTHERS),
        ("EngineCore_DP1", OTHERS),
        ("VllmWorker-0", OTHERS),
        ("Process-1", OTHERS | {"bound", "listening"}),
    ],
)
def test_engines_let_go_of_ports(process: str, kept: set[str]) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, process], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == kept
