"""Declares the operators for mixture of experts: routing tokens to experts, and the experts themselves.

Routing is small and exact: scores are float32 for every dtype of the logits, because another order of the scores
chooses other experts. The experts are most of such a model's work; a device that implements `moe_experts` decides
how tokens are grouped. The reference reads the number of tokens per expert on the host, once per call: it
is correct on every device, but a device that captures graphs needs a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from vllm_backplane.errors import OperatorError, nearest
from vllm_backplane.ops.activations import gelu_of
from vllm_backplane.ops.operator import Sample, SampleSpace, Tolerance, operator

GATED = ("silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "situ")
"""Names of the activations with a gate, as vLLM has them."""
PLAIN = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
"""Names of the activations without a gate."""


def _route_samples(space: SampleSpace) -> Iterator[Sample]:
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        for renormalize in (False, True):
            yield Sample(f"{scoring}, {renormalize}", (space.normal(5, 16), 4, renormalize, scoring))
    bias = space.normal(16, dtype=torch.float32)
    yield Sample("bias", (space.normal(5, 16), 4, True, "sigmoid", bias, 0, 0, 2.5))
    yield Sample("groups", (space.normal(5, 16), 4, False, "softmax", None, 4, 2, 1.5))
    yield Sample("groups and bias", (space.normal(5, 16), 4, True, "sigmoid", bias, 8, 3, 2.5))
    yield Sample("all experts", (space.normal(3, 4), 4, True, "softmax"))
    yield Sample("one expert", (space.normal(3, 4), 1, True, "sigmoid"))
    yield Sample("no token", (space.normal(0, 8), 2, True, "softmax"))


def _route_fake(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scoring: str,
    correction_bias: torch.Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (router_logits.shape[0], top_k)
    weights = router_logits.new_empty(shape, dtype=torch.float32)
    return weights, weights.new_empty(shape, dtype=torch.int32)


@operator(
    "(Tensor router_logits, int top_k, bool renormalize, str scoring, Tensor? correction_bias=None,"
    " int num_expert_group=0, int topk_group=0, float routed_scaling_factor=1.0) -> (Tensor, Tensor)",
    samples=_route_samples,
    fake=_route_fake,
    tolerances=dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), Tolerance(1e-5, 1e-6)),
)
def moe_route(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scoring: str,
    correction_bias: torch.Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights (float32) and ids (int32), both [tokens, top_k], of each token's experts, best first.

    Scores are the softmax, sigmoid or sqrt(softplus) of the logits. The bias affects the choice but not the
    weights. With groups (0: none), only experts of the best `topk_group` groups can be chosen; the score of a
    group is that of its best expert or, with a bias, the sum of its best two. Of equal scores the lower id
    wins.
    """
    logits = router_logits.float()
    if scoring == "softmax":
        scores = logits.softmax(dim=-1)
    elif scoring == "sigmoid":
        scores = logits.sigmoid()
    elif scoring == "sqrtsoftplus":
        scores = F.softplus(logits).sqrt()
    else:
        known = ("softmax", "sigmoid", "sqrtsoftplus")
        raise OperatorError(f"moe_route: unknown scoring {scoring!r}{nearest(scoring, known)}")
    choice = scores if correction_bias is None else scores + correction_bias.float()
    if num_expert_group:
        tokens, experts = choice.shape
        if experts % num_expert_group:
            raise OperatorError(f"moe_route: {experts} experts do not divide into {num_expert_group} groups")
        grouped = choice.view(tokens, num_expert_group, experts // num_expert_group)
        if correction_bias is None:
            quality = grouped.amax(dim=-1)
        else:
            quality = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        best = quality.argsort(dim=-1, descending=True, stable=True)[:, :topk_group]
        excluded = torch.ones_like(quality, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(excluded.unsqueeze(-1), -float("inf")).reshape(tokens, experts)
    ids = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if routed_scaling_factor != 1.0:
        weights = weights * routed_scaling_factor
    return weights, ids.to(torch.int32)


def _unknown_activation(name: str) -> OperatorError:
    return OperatorError(f"moe_experts: unknown activation {name!r}{nearest(name, GATED + PLAIN)}")


def apply_activation(
    name: str, projected: torch.Tensor, alpha: float, limit: float | None, beta: float
) -> torch.Tensor:
    """Returns the activation between the two matrix products of `moe_experts`; quantized experts use it as well."""
    x = projected.float()
    if name in PLAIN:
        if name == "relu2_no_mul":
            y = x.clamp(min=0.0).square()
        elif name == "silu_no_mul":
            y = x * torch.sigmoid(x)
        else:
            y = gelu_of(x, "tanh" if name == "gelu_tanh_no_mul" else "none")
        return y.to(projected.dtype)
    if name == "swigluoai":
        gate, up = x[..., ::2], x[..., 1::2]
    else:
        gate, up = x.chunk(2, dim=-1)
    if name in ("silu", "swigluoai"):
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = gate * torch.sigmoid(alpha * gate) * (up + beta)
    elif name == "swiglustep":
        gate = gate * torch.sigmoid(gate)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = gate * up
    elif name == "situ":
        bounded = up if limit is None else limit * torch.tanh(up / limit)
        y = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * bounded
    elif name in ("gelu", "gelu_tanh"):
        y = gelu_of(gate, "tanh" if name == "gelu_tanh" else "none") * up
    else:
        raise _unknown_activation(name)
    return y.to(projected.dtype)


def _experts_samples(space: SampleSpace) -> Iterator[Sample]:
    def sample(label: str, tokens: int, experts: int, top_k: int, activation: str, *rest: object) -> Sample:
        hidden, inner = 24, 16
        width = inner if activation in PLAIN else 2 * inner
        weights = space.normal(tokens, experts, dtype=torch.float32).softmax(-1)[:, :top_k]
        ids = space.normal(tokens, experts, dtype=torch.float32).argsort(-1)[:, :top_k].int()
        return Sample(
            f"{label}, {activation}",
            (
                space.normal(tokens, hidden),
                space.normal(experts, width, hidden) / 5,
                space.normal(experts, hidden, inner) / 4,
                weights,
                ids,
                activation,
                *rest,
            ),
        )

    for activation in ("silu", "gelu", "gelu_tanh", "relu2_no_mul", "silu_no_mul"):
        yield sample("plain", 7, 6, 2, activation)
    yield sample("biases", 7, 4, 2, "swigluoai", *_biases(space, 4, 32, 24), None, False, 1.702, 7.0, 1.0)
    yield sample("limit", 7, 4, 2, "silu", None, None, None, False, 1.0, 0.5, 0.0)
    yield sample("limit", 7, 4, 2, "swiglustep", None, None, None, False, 1.0, 0.5)
    yield sample("soft limit", 7, 4, 2, "situ", None, None, None, False, 2.0, 3.0)
    yield sample("router weight on input", 7, 4, 1, "silu", None, None, None, True)
    yield sample("no token", 0, 4, 2, "silu")
    yield sample("one token", 1, 8, 3, "silu")
    expert_map = space.tensor([-1, 0, -1, 1, 2, 3], torch.int32)
    mapped = sample("experts on other ranks", 7, 4, 2, "silu", None, None, expert_map)
    ids = space.integers(6, 7, 2, dtype=torch.int32)
    yield Sample(mapped.label, (*mapped.args[:4], ids, *mapped.args[5:]))
    padded = sample("padded ids", 5, 4, 2, "silu")
    ids = space.integers(4, 5, 2, low=-1, dtype=torch.int32)
    yield Sample(padded.label, (*padded.args[:4], ids, *padded.args[5:]))


def _biases(space: SampleSpace, experts: int, width: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    return space.normal(experts, width), space.normal(experts, hidden)


def _experts_fake(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *_args: object, **_kwargs: object
) -> torch.Tensor:
    return x.new_empty((x.shape[0], w2.shape[1]))


@operator(
    "(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation,"
    " Tensor? w13_bias=None, Tensor? w2_bias=None, Tensor? expert_map=None,"
    " bool apply_router_weight_on_input=False, float alpha=1.0, float? limit=None, float beta=0.0) -> Tensor",
    samples=_experts_samples,
    fake=_experts_fake,
    reads_values=True,
    tolerances={
        torch.float32: Tolerance(1e-4, 1e-4),
        torch.float16: Tolerance(5e-3, 5e-3),
        torch.bfloat16: Tolerance(3e-2, 3e-2),
    },
)
def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    beta: float = 0.0,
) -> torch.Tensor:
    """Returns the weighted sum of each token's experts: activation(x w13 + bias) w2 + bias, per expert.

    x [tokens, hidden]; w13 [experts, 2 * inner, hidden], gate rows before up rows (alternating for
    "swigluoai"), or [experts, inner, hidden] for activations without a gate, "..._no_mul"; w2 [experts,
    hidden, inner]. `expert_map` turns the ids into indices of w13 and w2; -1, in the map or as an id, adds
    nothing. "silu" and "swigluoai" are gate * sigmoid(alpha * gate) * (up + beta), after clamping gate to
    at most `limit` and up to [-limit, limit]; "swiglustep" clamps silu(gate) instead; "situ" bounds softly, by
    alpha * tanh(gate / alpha) * sigmoid(gate) and limit * tanh(up / limit).
    """
    if activation not in GATED + PLAIN:
        raise _unknown_activation(activation)
    experts, top_k = w13.shape[0], topk_ids.shape[1]
    index = topk_ids.long()
    if expert_map is not None:
        index = torch.where(index >= 0, expert_map.long()[index.clamp(min=0)], -1)
    index = torch.where((index >= 0) & (index < experts), index, experts).flatten()
    order = index.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, index, torch.ones_like(index))
    scale = topk_weights.float().flatten().unsqueeze(1)
    total = torch.zeros((x.shape[0], w2.shape[1]), dtype=torch.float32, device=x.device)
    begin = 0
    for expert, count in enumerate(counts[:experts].tolist()):
        if count == 0:
            continue
        pairs = order[begin : begin + count]
        begin += count
        rows = pairs // top_k
        inputs = x[rows]
        if apply_router_weight_on_input:
            inputs = (inputs.float() * scale[pairs]).to(x.dtype)
        projected = F.linear(inputs, w13[expert], None if w13_bias is None else w13_bias[expert])
        inner = apply_activation(activation, projected, alpha, limit, beta)
        outputs = F.linear(inner, w2[expert], None if w2_bias is None else w2_bias[expert]).float()
        if not apply_router_weight_on_input:
            outputs = outputs * scale[pairs]
        total.index_add_(0, rows, outputs)
    return total.to(x.dtype)
