"""Tests that two replicas on one host have one copy of the weights in memory (docs/serve/shared-weights.md)."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import reference
from server import LIMITS, Server

from vllm_backplane.weights.sealed_memory import NAME

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 12
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 5000 + 5 for place in range(40)], [7, 300, 21, 90, 44]]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "shared-weights.md").read_text()


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    [documented] = re.findall(r"^vllm-backplane serve \S+ (.*)$", PAGE, re.MULTILINE)
    given = (str(smollm2), "--served-model-name", "tiny", *LIMITS, *documented.split(), "--api-server-count", "1")
    variables = {"BACKPLANE_MEMORY_SHARE": "0.2"}
    # The server has its own folder for temporary files, so that its registry does not contain servers of other tests
    # with the same model. The name of the folder is short, because it also contains sockets.
    with (
        tempfile.TemporaryDirectory() as own,
        Server(tmp_path_factory.mktemp("server"), *given, variables={**variables, "TMPDIR": own}) as server,
    ):
        yield server


@dataclass(frozen=True)
class Mapped:
    """Counts the bytes of the shared weights in one process: its resident set size and its proportional set size."""

    resident: int
    proportional: int


def mapped(process: psutil.Process) -> Mapped:
    """Returns how much of the shared weights a process has mapped."""
    resident = proportional = 0
    try:
        listing = Path(f"/proc/{process.pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError):  # a helper process of the server has ended
        listing = ""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", listing, flags=re.M):
        if NAME in mapping.partition("\n")[0]:
            values = {name: int(count) << 10 for name, count in re.findall(r"^(\w+): +(\d+) kB$", mapping, re.M)}
            resident += values["Rss"]
            proportional += values["Pss"]
    return Mapped(resident, proportional)


@pytest.mark.feature("Weights: shared between the workers of a host", "cpu")
def test_two_replicas_have_the_weights_once(server: Server, smollm2: Path) -> None:
    expected = reference.continue_together(reference.load(smollm2), PROMPTS, TOKENS)
    assert min(one.smallest_margin for one in expected) > 1e-3, "near a tie; change the prompts"
    for replica in (0, 1):
        for prompt, one in zip(PROMPTS, expected, strict=True):
            assert server.complete(prompt, TOKENS, replica=replica)["token_ids"] == one.token_ids

    weights = (smollm2 / "model.safetensors").stat().st_size
    workers = [found for process in server.descendants() if (found := mapped(process)).resident]
    assert len(workers) == 2
    # The first worker reads few rows of the embedding, which is nearly half of this model. The other worker has read
    # all weights to compare them.
    smaller, larger = sorted(one.resident for one in workers)
    assert larger > 0.95 * weights and smaller > 0.4 * weights
    assert sum(one.proportional for one in workers) < 1.1 * weights


def test_no_copy_is_left(server: Server) -> None:
    logged = re.findall(
        r"Weights: (\S+) MiB mapped from other workers, (\S+) MiB placed for others to map, (\S+) MiB of this",
        server.text(),
    )
    found, placed, own = zip(*(map(float, line) for line in logged), strict=True)
    assert len(logged) == 2
    assert sorted(found)[0] == sorted(placed)[0] == 0
    assert max(found) == max(placed) > 40
    assert max(own) < 1
    assert "of weights are in this worker's private memory too" not in server.text()
