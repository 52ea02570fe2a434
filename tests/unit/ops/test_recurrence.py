"""Tests the operators of recurrent layers against a loop over each row's tokens in numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_backplane import ops

LENGTHS, BEFORE, SLOTS = [1, 5, 2, 0], [6, 0, 3, 0], [2, 4, 1, 0]
"""A decode row, a prompt, a chunk of a prompt, and padding."""
TOKENS = sum(LENGTHS)
STARTS = [sum(LENGTHS[:row]) for row in range(len(LENGTHS) + 1)]
PLACES = (
    torch.tensor(SLOTS, dtype=torch.int32),
    torch.tensor(STARTS, dtype=torch.int32),
    torch.tensor([new + old for new, old in zip(LENGTHS, BEFORE, strict=True)], dtype=torch.int32),
)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows() -> list[tuple[range, int, bool]]:
    """Returns the tokens and the slot of each row, and whether it continues from the slot's state."""
    found = zip(STARTS, LENGTHS, SLOTS, BEFORE, strict=False)
    return [(range(start, start + length), slot, before > 0) for start, length, slot, before in found if length]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def compare_states(got: torch.Tensor, wanted: np.ndarray, before: torch.Tensor) -> None:
    used = [slot for _, slot, _ in rows()]
    np.testing.assert_allclose(got[used].numpy(), wanted[used], **CLOSE)
    assert torch.equal(got[3], before[3]), "another request's state was touched"


@pytest.mark.parametrize("width", [2, 4])
def test_convolution(width: int) -> None:
    x, weight, bias = draw(TOKENS, 3), draw(3, width, seed=1), draw(3, seed=2)
    state = draw(5, 3, width - 1, seed=3)
    before, wanted_state = state.clone(), state.double().numpy().copy()
    got = ops.causal_convolution(x, weight, bias, state, *PLACES, True)
    values, taps = x.double().numpy(), weight.double().numpy()
    for tokens, slot, resumed in rows():
        past = wanted_state[slot] if resumed else np.zeros((3, width - 1))
        for token in tokens:
            window = np.concatenate([past, values[token][:, None]], 1)
            wanted = silu((window * taps).sum(1) + bias.double().numpy())
            np.testing.assert_allclose(got[token].numpy(), wanted, **CLOSE)
            past = window[:, 1:]
        wanted_state[slot] = past
    compare_states(state, wanted_state, before)


@pytest.mark.parametrize(("heads", "head", "groups", "own"), [(4, 3, 2, 1), (4, 1, 1, 5)], ids=["Mamba2", "Mamba"])
def test_scan(heads: int, head: int, groups: int, own: int) -> None:
    x, dt, a = draw(TOKENS, heads, head), draw(TOKENS, heads, seed=1), -draw(heads, own, seed=2).abs()
    b, c = draw(TOKENS, groups, 5, seed=3), draw(TOKENS, groups, 5, seed=4)
    d, dt_bias, state = draw(heads, seed=5), draw(heads, seed=6), draw(5, heads, head, 5, seed=7)
    before, wanted_state = state.clone(), state.double().numpy().copy()
    got = ops.selective_scan(x, dt, a, b, c, d, dt_bias, state, *PLACES, max(LENGTHS))
    xs, bs, cs = (value.double().numpy() for value in (x, b, c))
    times = np.log1p(np.exp((dt + dt_bias).double().numpy()))
    for tokens, slot, resumed in rows():
        hidden = wanted_state[slot] if resumed else np.zeros((heads, head, 5))
        for token in tokens:
            for place in range(heads):
                group = place // (heads // groups)
                t = times[token, place]
                hidden[place] = np.exp(t * a[place].double().numpy()) * hidden[place]
                hidden[place] += t * np.outer(xs[token, place], bs[token, group])
                wanted = hidden[place] @ cs[token, group] + float(d[place]) * xs[token, place]
                np.testing.assert_allclose(got[token, place].numpy(), wanted, **CLOSE)
        wanted_state[slot] = hidden
    compare_states(state, wanted_state, before)


def test_delta_rule() -> None:
    query, key, value = draw(TOKENS, 2, 6) / 6, draw(TOKENS, 2, 6, seed=1) / 3, draw(TOKENS, 4, 3, seed=2)
    decay, strength = -draw(TOKENS, 4, seed=3).abs(), draw(TOKENS, 4, seed=4).sigmoid()
    state = draw(5, 4, 3, 6, seed=5)
    before, wanted_state = state.clone(), state.double().numpy().copy()
    got = ops.gated_delta_rule(query, key, value, decay, strength, state, *PLACES, max(LENGTHS))
    q, k, v = (tensor.double().numpy() for tensor in (query, key, value))
    for tokens, slot, resumed in rows():
        memory = wanted_state[slot] if resumed else np.zeros((4, 3, 6))
        for token in tokens:
            for place in range(4):
                where = k[token, place // 2]
                memory[place] = memory[place] * np.exp(float(decay[token, place]))
                missing = (v[token, place] - memory[place] @ where) * float(strength[token, place])
                memory[place] += np.outer(missing, where)
                np.testing.assert_allclose(got[token, place].numpy(), memory[place] @ q[token, place // 2], **CLOSE)
        wanted_state[slot] = memory
    compare_states(state, wanted_state, before)


def test_a_prompt_in_pieces_is_the_prompt() -> None:
    """The state after the first chunk is the initial state of the second."""
    x, weight, whole = draw(6, 3), draw(3, 4, seed=1), torch.zeros(2, 3, 3)
    slot, pieces = torch.tensor([1]), torch.zeros(2, 3, 3)

    def places(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return slot, torch.tensor([0, last - first]), torch.tensor([last])

    wanted = ops.causal_convolution(x, weight, None, whole, *places(0, 6), False)
    cuts = [(0, 2), (2, 3), (3, 6)]
    got = [ops.causal_convolution(x[a:b], weight, None, pieces, *places(a, b), False) for a, b in cuts]
    torch.testing.assert_close(torch.cat(got), wanted)
    torch.testing.assert_close(pieces, whole)
