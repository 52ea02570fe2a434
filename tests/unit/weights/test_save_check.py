"""Checks that weights are saved only if a loader can read them, which needs the layout in which they were loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_backplane.errors import BackplaneError
from vllm_backplane.layers.linear import refuse_loading
from vllm_backplane.weights import save_check
from vllm_backplane.worker.worker import BackplaneWorker

METHODS = ("save_sharded_state", "save_tensorized_model")


def worker(*, arranged: bool = False, quantization: str | None = None, rank: int = 0) -> Any:
    model = torch.nn.Linear(2, 2)
    if arranged:
        model.weight.weight_loader = refuse_loading  # type: ignore[assignment]
    made: Any = object.__new__(BackplaneWorker)
    made.model_runner = SimpleNamespace(get_model=lambda: model)
    made.model_config = SimpleNamespace(quantization=quantization)
    made.parallel_config, made.rank = SimpleNamespace(world_size=2), rank
    return made


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the paths that vLLM's own methods have written. All workers have the same failure."""
    found: list[str] = []
    monkeypatch.setattr(save_check, "gather_failure", lambda failure: failure)
    for method in METHODS:
        monkeypatch.setattr(Worker, method, lambda _self, path: found.append(path))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_weights_as_they_were_loaded_are_written(written: list[str], method: str) -> None:
    getattr(worker(), method)("here")
    assert written == ["here"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"arranged": True}, "1 weights, such as weight, were rearranged for this device"),
        ({"quantization": "gptq"}, r"quantized \(gptq\)"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_others_are_refused_with_the_remedy(written: list[str], method: str, form: Any, message: str) -> None:
    """Weights that cannot be saved are refused by the last rank, for all ranks."""
    with pytest.raises(BackplaneError, match=rf"{method} .*{message}.*Load the original checkpoint"):
        getattr(worker(rank=1, **form), method)("here")
    getattr(worker(rank=0, **form), method)("here")
    assert written == []
