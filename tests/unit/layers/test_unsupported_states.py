"""Tests that unsupported layers with a recurrent state are refused by name: they would call Triton."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from vllm_backplane.errors import BackplaneError
from vllm_backplane.layers.delta_net import BackplaneQwenGatedDeltaNetAttention
from vllm_backplane.layers.mamba import BackplaneMambaMixer, BackplaneMambaMixer2, refuse_unsupported_state_layers

OURS = [kind.__new__(kind) for kind in (BackplaneMambaMixer, BackplaneMambaMixer2, BackplaneQwenGatedDeltaNetAttention)]


def test_layers_that_are_replaced_are_not_refused() -> None:
    refuse_unsupported_state_layers([*OURS, torch.nn.Linear(1, 1)])


def test_another_kind_is_refused_by_name() -> None:
    with pytest.raises(BackplaneError, match=r"of the kind ShortConv, .* choose another model"):
        refuse_unsupported_state_layers([*OURS, ShortConv.__new__(ShortConv)])
