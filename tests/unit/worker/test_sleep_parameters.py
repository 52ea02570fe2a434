"""Tests which parameters --sleep-preserve-parameter-names selects for sleep level 2."""

from __future__ import annotations

import pytest
import torch

from vllm_backplane.errors import BackplaneError
from vllm_backplane.worker.sleep import preserved_parameters


class Draft(torch.nn.Module):
    def __init__(self, shared: torch.nn.Parameter) -> None:
        super().__init__()
        self.shared = shared
        self.own = torch.nn.Parameter(torch.zeros(2))


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))


def test_globs_choose_parameters(model: torch.nn.Module) -> None:
    weights = [model[0].weight, model[1].weight]  # type: ignore[index]
    found = preserved_parameters(["*.weight"], model, None)
    assert [id(one) for one in found] == [id(one) for one in weights]
    assert preserved_parameters([], model, None) == []
    assert [id(one) for one in preserved_parameters(["0.*", "0.bias"], model, None)] == [
        id(model[0].weight),  # type: ignore[index]
        id(model[0].bias),  # type: ignore[index]
    ]


def test_the_draft_models_own_have_a_name_of_theirs(model: torch.nn.Module) -> None:
    draft = Draft(model[0].weight)  # type: ignore[index]
    assert [id(one) for one in preserved_parameters(["draft.*"], model, draft)] == [id(draft.own)]
    assert preserved_parameters(["draft.*"], model, None) == []


@pytest.mark.parametrize("pattern", ["2.*", "weight", "draft.own"])
def test_a_pattern_that_names_nothing_is_refused(model: torch.nn.Module, pattern: str) -> None:
    with pytest.raises(BackplaneError, match=r"sleep-preserve-parameter-names has .*; there are 0\.weight, 0\.bias"):
        preserved_parameters([pattern], model, None)
