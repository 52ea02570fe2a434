"""Tests the operators for mixture of experts against plain loops in numpy float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_backplane import ops
from vllm_backplane.errors import OperatorError


def scores_of(logits: np.ndarray, scoring: str) -> np.ndarray:
    if scoring == "softmax":
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.sqrt(np.log1p(np.exp(logits)))


def route(
    logits: np.ndarray,
    top_k: int,
    renormalize: bool,
    scoring: str,
    bias: np.ndarray | None = None,
    groups: int = 0,
    top_groups: int = 0,
    factor: float = 1.0,
) -> tuple[list[list[float]], list[list[int]]]:
    all_weights, all_ids = [], []
    for row in logits.astype(np.float64):
        scores = scores_of(row, scoring)
        choice = scores if bias is None else scores + bias
        candidates = list(range(len(row)))
        if groups:
            size = len(row) // groups
            members = [candidates[g * size : (g + 1) * size] for g in range(groups)]
            counted = 1 if bias is None else 2
            quality = [sum(sorted((choice[e] for e in group), reverse=True)[:counted]) for group in members]
            best = sorted(range(groups), key=lambda g: -quality[g])[:top_groups]
            candidates = [e for g in best for e in members[g]]
        ids = sorted(candidates, key=lambda e: (-choice[e], e))[:top_k]
        weights = [scores[e] for e in ids]
        total = sum(weights) if renormalize else 1.0
        all_weights.append([factor * weight / total for weight in weights])
        all_ids.append(ids)
    return all_weights, all_ids


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("groups", "top_groups"), [(0, 0), (4, 2), (8, 3), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route(
    scoring: str, renormalize: bool, with_bias: bool, groups: int, top_groups: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(9)
    # Values are far enough apart that rounding to bfloat16 makes no ties.
    logits = torch.stack([torch.randperm(16, generator=generator) for _ in range(12)]).to(dtype) / 4 - 2
    bias = torch.randn(16, generator=generator) if with_bias else None
    weights, ids = ops.moe_route(logits, 4, renormalize, scoring, bias, groups, top_groups, 2.5)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    wanted_weights, wanted_ids = route(
        logits.double().numpy(),
        4,
        renormalize,
        scoring,
        None if bias is None else bias.double().numpy(),
        groups,
        top_groups,
        2.5,
    )
    assert ids.tolist() == wanted_ids
    np.testing.assert_allclose(weights.numpy(), wanted_weights, rtol=1e-5)


def test_of_equal_scores_the_lower_id_wins() -> None:
    _, ids = ops.moe_route(torch.zeros(2, 8), 3, True, "softmax")
    assert ids.tolist() == [[0, 1, 2]] * 2
    _, ids = ops.moe_route(torch.zeros(1, 8), 2, True, "softmax", None, 4, 1)
    assert ids.tolist() == [[0, 1]]


def test_route_of_no_token() -> None:
    weights, ids = ops.moe_route(torch.empty(0, 8), 2, True, "sigmoid", None, 2, 1)
    assert weights.shape == ids.shape == (0, 2)


def test_route_refuses_what_it_does_not_know() -> None:
    with pytest.raises(OperatorError, match="did you mean 'sigmoid'"):
        ops.moe_route.reference(torch.zeros(1, 8), 2, True, "sigmoyd")
    with pytest.raises(OperatorError, match="8 experts do not divide into 3 groups"):
        ops.moe_route.reference(torch.zeros(1, 8), 2, True, "softmax", None, 3, 1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def activate(name: str, h: np.ndarray, alpha: float, limit: float | None, beta: float) -> np.ndarray:
    bound = math.inf if limit is None else limit
    if name == "relu2_no_mul":
        return np.maximum(h, 0) ** 2
    if name == "silu_no_mul":
        return h * sigmoid(h)
    if name == "gelu_no_mul":
        return gelu(h)
    if name == "gelu_tanh_no_mul":
        return gelu_tanh(h)
    half = len(h) // 2
    gate, up = (h[0::2], h[1::2]) if name == "swigluoai" else (h[:half], h[half:])
    if name == "gelu":
        return gelu(gate) * up
    if name == "gelu_tanh":
        return gelu_tanh(gate) * up
    if name == "situ":
        return alpha * np.tanh(gate / alpha) * sigmoid(gate) * (up if limit is None else limit * np.tanh(up / limit))
    if name == "swiglustep":
        return np.minimum(gate * sigmoid(gate), bound) * np.clip(up, -bound, bound)
    gate, up = np.minimum(gate, bound), np.clip(up, -bound, bound)
    return gate * sigmoid(alpha * gate) * (up + beta)


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    expert_map: list[int] | None = None,
    on_input: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    beta: float = 0.0,
) -> np.ndarray:
    def wide(t: torch.Tensor) -> np.ndarray:
        return t.double().numpy()

    out = np.zeros((x.shape[0], w2.shape[1]))
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            place = expert if expert_map is None or expert < 0 else expert_map[expert]
            if place < 0:
                continue
            value = wide(x[token]) * (weight if on_input else 1.0)
            hidden = wide(w13[place]) @ value + (0 if b13 is None else wide(b13[place]))
            result = wide(w2[place]) @ activate(activation, hidden, alpha, limit, beta)
            result = result + (0 if b2 is None else wide(b2[place]))
            out[token] += result * (1.0 if on_input else weight)
    return out


def problem(tokens: int, count: int, top_k: int, gated: bool, ids_below: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + count)
    hidden, inner = 10, 6
    width = 2 * inner if gated else inner
    ids = torch.stack([torch.randperm(ids_below or count, generator=generator)[:top_k] for _ in range(tokens)])
    return [
        torch.randn(tokens, hidden, generator=generator),
        torch.randn(count, width, hidden, generator=generator) * 0.7,
        torch.randn(count, hidden, inner, generator=generator),
        torch.rand(tokens, top_k, generator=generator),
        ids.int(),
    ]


@pytest.mark.parametrize(
    ("activation", "alpha", "limit", "beta"),
    [
        ("silu", 1.0, None, 0.0),
        ("silu", 1.0, 0.8, 0.0),
        ("silu", 1.702, 1.5, 1.0),
        ("gelu", 1.0, None, 0.0),
        ("gelu_tanh", 1.0, None, 0.0),
        ("swigluoai", 1.702, 1.1, 1.0),
        ("swiglustep", 1.0, 0.7, 0.0),
        ("situ", 2.0, None, 0.0),
        ("situ", 2.0, 3.0, 0.0),
        ("relu2_no_mul", 1.0, None, 0.0),
        ("silu_no_mul", 1.0, None, 0.0),
        ("gelu_no_mul", 1.0, None, 0.0),
        ("gelu_tanh_no_mul", 1.0, None, 0.0),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_experts(activation: str, alpha: float, limit: float | None, beta: float, biased: bool) -> None:
    args = problem(9, 5, 3, not activation.endswith("_no_mul"))
    biases = [torch.randn(5, args[1].shape[1]), torch.randn(5, 10)] if biased else [None, None]
    got = ops.moe_experts(*args, activation, *biases, None, False, alpha, limit, beta)
    wanted = experts(*args, activation, *biases, None, False, alpha, limit, beta)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_experts_of_other_ranks_add_nothing_here_and_all_ranks_make_the_whole() -> None:
    args = problem(8, 6, 2, True)
    whole = experts(*args, "silu")
    total = np.zeros_like(whole)
    for local in ([0, 3, 4], [5, 1, 2]):
        expert_map = [local.index(e) if e in local else -1 for e in range(6)]
        shard = [args[0], args[1][local], args[2][local], *args[3:]]
        part = ops.moe_experts(*shard, "silu", None, None, torch.tensor(expert_map, dtype=torch.int32))
        np.testing.assert_allclose(part.numpy(), experts(*shard, "silu", None, None, expert_map), atol=1e-5)
        total += part.numpy()
    np.testing.assert_allclose(total, whole, rtol=1e-4, atol=1e-5)


def test_a_rank_without_the_chosen_experts_gives_zero() -> None:
    args = problem(4, 2, 2, True)
    nowhere = torch.tensor([-1, -1], dtype=torch.int32)
    assert ops.moe_experts(*args, "silu", None, None, nowhere).abs().max() == 0


def test_padded_ids_add_nothing() -> None:
    args = problem(5, 4, 2, True)
    args[4][1] = -1
    args[4][3, 0] = -1
    got = ops.moe_experts(*args, "silu")
    np.testing.assert_allclose(got.numpy(), experts(*args, "silu"), rtol=1e-4, atol=1e-5)
    assert got[1].abs().max() == 0


def test_padded_ids_add_nothing_under_a_map_either() -> None:
    args = problem(3, 2, 2, True)
    args[4][0] = -1
    got = ops.moe_experts(*args, "silu", None, None, torch.tensor([1, 0], dtype=torch.int32))
    assert got[0].abs().max() == 0
    np.testing.assert_allclose(got.numpy(), experts(*args, "silu", None, None, [1, 0]), rtol=1e-4, atol=1e-5)


def test_weight_on_the_input() -> None:
    args = problem(6, 4, 1, True)
    got = ops.moe_experts(*args, "silu", None, None, None, True)
    np.testing.assert_allclose(got.numpy(), experts(*args, "silu", on_input=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_in_half_precision(dtype: torch.dtype) -> None:
    args = problem(7, 4, 2, True)
    half = [*(tensor.to(dtype) for tensor in args[:3]), *args[3:]]
    got = ops.moe_experts(*half, "silu")
    assert got.dtype == dtype
    size = 2e-3 if dtype is torch.float16 else 1.6e-2
    wanted = experts(*half, "silu")
    np.testing.assert_allclose(got.double().numpy(), wanted, rtol=size, atol=size * np.abs(wanted).max())


def test_no_token() -> None:
    args = problem(3, 4, 2, True)
    empty = [args[0][:0], args[1], args[2], args[3][:0], args[4][:0]]
    assert ops.moe_experts(*empty, "silu").shape == (0, 10)


def test_unknown_activation() -> None:
    with pytest.raises(OperatorError, match="did you mean 'silu'"):
        ops.moe_experts.reference(*problem(1, 2, 1, True), "sillu")
