"""Checks actions of all ranks or none: which rank raises, and that the workers exit if undoing fails too."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.distributed import all_or_none
from vllm_backplane.errors import BackplaneError
from vllm_backplane.worker.worker import BackplaneWorker

TWO: Any = SimpleNamespace(world_size=2)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the failure of this rank that of all ranks."""
    monkeypatch.setattr(all_or_none, "gather_failure", lambda failure: failure)


def failing(text: str) -> Callable[[], None]:
    def act() -> None:
        raise RuntimeError(text)

    return act


def test_the_last_rank_raises_and_every_rank_undoes() -> None:
    undone: list[int] = []
    all_or_none.run_all_or_none(TWO, 0, failing("full"), lambda: undone.append(0))
    with pytest.raises(BackplaneError, match="rank 1: full"):
        all_or_none.run_all_or_none(TWO, 1, failing("full"), lambda: undone.append(1))
    assert undone == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_ends_where_nothing_is_known_any_more(rank: int) -> None:
    with pytest.raises(SystemExit, match=r"full; and it could not be undone: rank .: gone"):
        all_or_none.run_all_or_none(TWO, rank, failing("full"), failing("gone"))


@pytest.mark.parametrize(
    ("enabled", "load_format", "reason"),
    [
        (False, "auto", "start with --enable-sleep-mode"),
        (True, "dummy", "--load-format dummy .* sleep at level 1"),
        (True, "gguf", "--load-format gguf cannot load them again; sleep at level 1"),
    ],
)
def test_a_sleep_without_a_way_back_is_refused_before_anything_is_given_up(
    enabled: bool, load_format: str, reason: str
) -> None:
    """`dummy` stands for any load format of vLLM's that cannot load weights again; the format for GGUF files is
    ours."""
    from vllm.config import LoadConfig

    from vllm_backplane.quantization.gguf.registration import register

    register()
    worker: Any = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=enabled),
        load_config=LoadConfig(load_format=load_format),
        parallel_config=TWO,
        rank=0,
    )
    BackplaneWorker.sleep(worker, 2)
    worker.rank = 1
    with pytest.raises(BackplaneError, match=reason):
        BackplaneWorker.sleep(worker, 2)
