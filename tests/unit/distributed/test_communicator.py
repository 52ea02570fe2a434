"""Checks collectives of unequal pieces, between real processes over gloo."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import programs

pytestmark = pytest.mark.process

# One process imports vLLM, which takes seconds; the ranks are forked from it.
SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from vllm_backplane.distributed.communicator import BackplaneCommunicator
from vllm_backplane.errors import BackplaneError

folder, world = sys.argv[1], int(sys.argv[2])
children = []
for rank in range(world):
    child = os.fork()
    if child == 0:
        break
    children.append(child)
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
store, target = f"{folder}/store", f"{folder}/{rank}.json"
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
group = dist.new_group(list(range(world)), backend="gloo")
comm = BackplaneCommunicator(cpu_group=group, device=torch.device("cpu"), device_group=group, unique_name="tp:0")
sizes = [2, 0, 3][:world] if world == 3 else [1, 4]
out = {}
mine = torch.full((sizes[rank], 2), float(rank + 1))
out["gatherv"] = comm.all_gatherv(mine, dim=0, sizes=sizes).tolist()
out["gatherv list"] = [t.tolist() for t in comm.all_gatherv([mine, mine * 10], dim=0, sizes=sizes)]
columns = mine.t().contiguous()
out["gatherv dim 1"] = comm.all_gatherv(columns, dim=-1, sizes=sizes).tolist()
out["gather equal"] = comm.all_gatherv(torch.tensor([[rank]]), dim=0).tolist()
total = sum(sizes)
whole = torch.arange(total * 2, dtype=torch.float32).reshape(total, 2) * (rank + 1)
kept = whole.clone()
out["scatterv"] = comm.reduce_scatterv(whole, dim=0, sizes=sizes).tolist()
out["input kept"] = bool((whole == kept).all())
square = torch.arange(world * 4, dtype=torch.float32).reshape(4, world) * (rank + 1)
out["scatter dim 1"] = comm.reduce_scatter(square, dim=1).tolist()
for name, call in {
    "bad gather": lambda: comm.all_gatherv(mine, sizes=[9] * world),
    "bad scatter": lambda: comm.reduce_scatterv(whole, dim=0, sizes=[1] * world),
    "uneven": lambda: comm.reduce_scatterv(torch.zeros(world + 1, 1), dim=0),
    "no all2all": lambda: comm.combine(mine),
}.items():
    try:
        call()
        out[name] = "no error"
    except BackplaneError as error:
        out[name] = str(error)
json.dump(out, open(target, "w"))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=[3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    done = programs.run(programs.command(SCRIPT, str(folder), str(world)), timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _sizes(ranks: list[dict[str, Any]]) -> list[int]:
    return [2, 0, 3] if len(ranks) == 3 else [1, 4]


def test_all_gatherv_lines_the_pieces_up_by_rank(ranks: list[dict[str, Any]]) -> None:
    expected = [[rank + 1.0] * 2 for rank, size in enumerate(_sizes(ranks)) for _ in range(size)]
    for result in ranks:
        assert result["gatherv"] == expected
        assert result["gatherv list"] == [expected, [[10 * v for v in row] for row in expected]]
        assert result["gatherv dim 1"] == [list(column) for column in zip(*expected, strict=True)]
        assert result["gather equal"] == [[rank] for rank in range(len(ranks))]


def test_reduce_scatterv_gives_each_rank_its_piece_of_the_sum(ranks: list[dict[str, Any]]) -> None:
    sizes, factor = _sizes(ranks), sum(range(1, len(ranks) + 1))
    start = 0
    for result, size in zip(ranks, sizes, strict=True):
        rows = range(start, start + size)
        assert result["scatterv"] == [[factor * (2.0 * row), factor * (2.0 * row + 1)] for row in rows]
        assert result["input kept"]
        start += size


def test_reduce_scatter_along_another_dimension(ranks: list[dict[str, Any]]) -> None:
    world, factor = len(ranks), sum(range(1, len(ranks) + 1))
    for rank, result in enumerate(ranks):
        assert result["scatter dim 1"] == [[factor * float(row * world + rank)] for row in range(4)]


def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert "but the sizes given" in result["bad gather"]
        assert "do not cut" in result["bad scatter"]
        assert "do not divide" in result["uneven"]
        assert "built without all-to-all" in result["no all2all"]
