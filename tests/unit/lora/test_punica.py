"""Compares the LoRA adapter arithmetic with matrix products per request in numpy float64."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper import punica_base

from vllm_backplane.lora.punica import BackplanePunicaWrapper

SLOTS, RANK, WIDTH, VOCABULARY = 3, 4, 10, 20
IDS: list[int | None] = [11, None, 12]
"""The adapter in each slot."""
TOKENS = (11, 0, 12, 12, 0, 11)
PROMPTS = (12, 0, 11)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacked(*shape: int, seed: int = 0) -> torch.Tensor:
    return draw(SLOTS, 1, *shape, seed=seed)


def slot(adapter: int) -> int | None:
    return IDS.index(adapter) if adapter else None


def wrapper(
    tokens: tuple[int, ...] = TOKENS, prompts: tuple[int, ...] = PROMPTS, is_prefill: bool = True
) -> BackplanePunicaWrapper:
    made = BackplanePunicaWrapper(16, 8, torch.device("cpu"), max_loras=SLOTS)
    made.update_metadata(LoRAMapping(tokens, prompts, is_prefill), IDS, SLOTS, VOCABULARY)
    return made


def low_rank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapters: tuple[int, ...], scale: float) -> np.ndarray:
    out = np.zeros((x.shape[0], b.shape[2]))
    for row, adapter in enumerate(adapters):
        place = slot(adapter)
        if place is not None:
            narrow = a[place, 0].double().numpy() @ x[row].double().numpy() * scale
            out[row] = b[place, 0].double().numpy() @ narrow
    return out


def close(got: torch.Tensor, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got.double().numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_nothing_abstract_is_left() -> None:
    assert not inspect.isabstract(BackplanePunicaWrapper)
    assert issubclass(BackplanePunicaWrapper, punica_base.PunicaWrapperBase)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_linear_with_slices(is_prefill: bool) -> None:
    x, y = draw(6, WIDTH), draw(6, 12, seed=1)
    sizes = (5, 3, 4)
    a = tuple(stacked(RANK, WIDTH, seed=10 + i) for i in range(3))
    b = tuple(stacked(size, RANK, seed=20 + i) for i, size in enumerate(sizes))
    wanted = y.double().numpy() + np.concatenate(
        [low_rank(x, *pair, TOKENS, 0.5) for pair in zip(a, b, strict=True)], 1
    )
    wrapper(is_prefill=is_prefill).add_lora_linear(y, x, a, b, 0.5, sizes)
    close(y, wanted)


def test_linear_with_more_dimensions() -> None:
    x, y = draw(2, 3, WIDTH), draw(2, 3, 5, seed=1)
    a, b = stacked(RANK, WIDTH, seed=2), stacked(5, RANK, seed=3)
    wanted = y.double().numpy().reshape(6, 5) + low_rank(x.view(6, WIDTH), a, b, TOKENS, 1.0)
    wrapper().add_lora_linear(y, x, (a,), (b,), 1.0, (5,))
    close(y.view(6, 5), wanted)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_shrink_then_expand_is_the_linear_layer(as_tensor: bool) -> None:
    """Does what fully sharded layers do, with an exchange between ranks in the middle."""
    x, y = draw(6, WIDTH), draw(6, 12, seed=1)
    a = (stacked(RANK, WIDTH, seed=2), stacked(RANK, WIDTH, seed=3))
    b = (stacked(4, RANK, seed=4), stacked(5, RANK, seed=5))
    narrow = torch.zeros(2, 6, RANK)
    made = wrapper()
    made.add_shrink(narrow if as_tensor else tuple(narrow.unbind()), x, a, 2.0)
    wanted = y.double().numpy().copy()
    wanted[:, 3:7] += low_rank(x, a[0], b[0], TOKENS, 2.0)
    wanted[:, 7:12] += low_rank(x, a[1], b[1], TOKENS, 2.0)
    made.add_expand(y, narrow, b, (4, 5), offset_start=3)
    close(y, wanted)


def test_shrink_replaces_what_the_buffer_held() -> None:
    narrow = torch.full((1, 6, RANK + 2), 9.0)
    wrapper().add_shrink(narrow, draw(6, WIDTH), (stacked(RANK, WIDTH),), 1.0)
    assert narrow[0, 1, :RANK].tolist() == [0.0] * RANK
    assert (narrow[0, :, RANK:] == 9.0).all()


def test_embedding() -> None:
    x, y, b = draw(6, RANK), draw(6, WIDTH, seed=1), stacked(WIDTH, RANK, seed=2)
    wanted = y.double().numpy().copy()
    for row, adapter in enumerate(TOKENS):
        if adapter:
            wanted[row] += b[slot(adapter), 0].double().numpy() @ x[row].double().numpy()
    wrapper().add_lora_embedding(y, x, b)
    close(y, wanted)


@pytest.mark.parametrize("columns", [VOCABULARY, VOCABULARY - 3, VOCABULARY + 3])
def test_logits_use_the_prompts_adapters(columns: int) -> None:
    x, y = draw(3, WIDTH), draw(3, columns, seed=1)
    a, b = stacked(RANK, WIDTH, seed=2), stacked(VOCABULARY, RANK, seed=3)
    shared = min(columns, VOCABULARY)
    wanted = y.double().numpy().copy()
    wanted[:, :shared] += low_rank(x, a, b, PROMPTS, 1.5)[:, :shared]
    wrapper().add_lora_logits(y, x, a, b, 1.5)
    close(y, wanted)


@pytest.mark.skipif(
    not hasattr(punica_base.PunicaWrapperBase, "_select_full_linear_output"),
    reason="this vLLM has no adapters of whole layers",
)
def test_full_linear() -> None:
    x, y = draw(3, WIDTH), draw(3, 5, seed=1)
    weight, bias = stacked(5, WIDTH, seed=2), draw(SLOTS, 5, seed=3)
    enabled = torch.tensor([False, True, True])
    wanted = y.double().numpy().copy()
    # Of the prompts' adapters, 12 is in slot 2, which replaces the layer; 11 is in slot 0, which does not.
    wanted[0] = weight[2, 0].double().numpy() @ x[0].double().numpy() + bias[2].double().numpy()
    wrapper().apply_lora_full_linear(y, x, weight, bias, enabled)
    close(y, wanted)


def test_without_adapters_nothing_changes() -> None:
    made = wrapper((0,) * 6, (0,) * 3)
    assert made.no_lora
    y, logits = draw(6, 5), draw(3, VOCABULARY)
    before = y.clone(), logits.clone()
    a, b = stacked(RANK, WIDTH), stacked(5, RANK)
    made.add_lora_linear(y, draw(6, WIDTH), (a,), (b,), 1.0, (5,))
    made.add_lora_embedding(y, draw(6, RANK), b)
    made.add_lora_logits(logits, draw(3, WIDTH), a, stacked(VOCABULARY, RANK), 1.0)
    assert torch.equal(y, before[0])
    assert torch.equal(logits, before[1])


def test_a_later_batch_with_adapters_is_served() -> None:
    made = wrapper((0,) * 6, (0,) * 3)
    made.update_metadata(LoRAMapping((12, 0), (12, 0), False), IDS, SLOTS, VOCABULARY)
    x, y = draw(2, WIDTH), torch.zeros(2, 5)
    a, b = stacked(RANK, WIDTH, seed=2), stacked(5, RANK, seed=3)
    made.add_lora_linear(y, x, (a,), (b,), 1.0, (5,))
    close(y, low_rank(x, a, b, (12, 0), 1.0))
