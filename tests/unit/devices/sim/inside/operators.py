"""Tests that PyTorch operators on the card give the results of the host, and that none of them runs on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

CARD = torch.device("bpnpu", 0)

Call = Callable[..., Any]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(-9, 10, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def indices(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high), dtype=dtype)


A = numbers(3, 4)
B = numbers(3, 4, seed=7)
ROW = numbers(4)
WIDE = numbers(5, 33)
POSITIVE = numbers(3, 4).abs() + 0.1
CUBE = numbers(2, 3, 4)
INTS = numbers(3, 4, dtype=torch.int64)
MASK = numbers(3, 4, dtype=torch.bool)
HALF = numbers(3, 4, dtype=torch.bfloat16)
EMPTY = numbers(0, 4)
SCALAR = torch.tensor(2.5)
LONG = torch.tensor([3, 1, 2])

CASES: dict[str, tuple[Call, tuple[Any, ...]]] = {
    # convolutions
    "convolution of a row": (partial(F.conv1d, stride=2, padding=1), (numbers(2, 6, 21), numbers(8, 6, 3), numbers(8))),
    "convolution in groups": (partial(F.conv1d, padding=1, groups=2), (numbers(2, 6, 20), numbers(8, 3, 3))),
    "convolution of a plane": (partial(F.conv2d, stride=4), (numbers(2, 3, 8, 12), numbers(5, 3, 4, 4), numbers(5))),
    # element by element
    "add": (lambda a, b: a + b, (A, B)),
    "add number": (lambda a: a + 2, (A,)),
    "add fraction to integers": (lambda a: a + 0.5, (INTS,)),
    "add host scalar": (lambda a: a + torch.tensor(3.0), (A,)),
    "add host scalar of a wider type": (lambda a: a + torch.tensor(3.0, dtype=torch.float64), (A,)),
    "add device scalar": (lambda a, s: a + s, (A, SCALAR)),
    "add alpha": (lambda a, b: torch.add(a, b, alpha=3), (A, B)),
    "broadcast": (lambda a, r: a * r, (A, ROW)),
    "broadcast both": (lambda a, r: a[:, :1] - r, (A, ROW)),
    "types promoted": (lambda a, i: a * i, (A, INTS)),
    "half with float": (lambda h, a: h + a, (HALF, A)),
    "transposed": (lambda a: a.t() * 2, (A,)),
    "strided": (lambda a: a[:, ::2] + a[:, 1::2], (A,)),
    "expanded": (lambda r: r.expand(5, 4) + 1, (ROW,)),
    "nothing": (lambda e: e * 2 + 1, (EMPTY,)),
    "scalar tensor": (lambda s: s * s, (SCALAR,)),
    "in place": (lambda a: a.clone().add_(1).mul_(2).sub_(0.5).div_(3), (A,)),
    "in place on a view": (lambda a: [c := a.clone(), c[1:].add_(10), c[:, 0].zero_()][0], (A,)),
    "in place on a transposed view": (
        lambda a: [c := a.clone(), c.t().mul_(torch.arange(3.0, device=a.device))][0],
        (A,),
    ),
    "rsub": (lambda a: 1 - a, (A,)),
    "rdiv": (lambda a: 1 / a, (POSITIVE,)),
    "divide integers": (lambda i: i / 2, (INTS,)),
    "floor divide": (lambda i: i // 2, (INTS,)),
    "floor divide tensors": (lambda i, j: torch.floor_divide(i, j), (INTS, INTS.abs() + 1)),
    "remainder": (lambda i: i % 3, (INTS,)),
    "remainder of a number": (lambda i: torch.remainder(7, i), (INTS.abs() + 1,)),
    "fmod": (lambda a: torch.fmod(a, 0.3), (A,)),
    "power": (lambda a: a**2, (A,)),
    "power of a number": (lambda a: 2**a, (A,)),
    "power of tensors": (lambda a, b: torch.pow(a, b), (POSITIVE, B)),
    "negate, absolute, sign": (lambda a: (-a).abs() * a.sign(), (A,)),
    "exp, log": (lambda p: p.log().exp().log1p().log2(), (POSITIVE,)),
    "sqrt, rsqrt, reciprocal": (lambda p: p.sqrt() + p.rsqrt() + p.reciprocal() + p.square(), (POSITIVE,)),
    "sin, cos, tanh, erf": (lambda a: a.sin() + a.cos() + a.tanh() + a.erf(), (A,)),
    "round, floor, ceil, trunc": (lambda a: a.round() + a.floor() + a.ceil() + a.trunc(), (A,)),
    "clamp": (lambda a: a.clamp(-0.5, 0.5), (A,)),
    "clamp in place": (lambda a: a.clone().clamp_(min=0.1), (A,)),
    "clamp by tensors": (lambda a, b: a.clamp(b - 1, b + 1), (A, B)),
    "minimum, maximum": (lambda a, b: torch.minimum(a, b) - torch.maximum(a, b), (A, B)),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), (A, B)),
    "addcmul, addcdiv": (lambda a, b: torch.addcmul(a, a, b, value=2) + torch.addcdiv(a, a, b), (A, B)),
    "nan_to_num": (lambda a: torch.nan_to_num(a / 0.0), (A,)),
    "isnan, isinf, isfinite": (lambda a: [(a / 0).isnan(), (a / 0).isinf(), a.isfinite()], (A,)),
    # comparisons and logic
    "compare": (lambda a, b: [a < b, a <= 0, a > b, a >= 0.5, a == a, a != b], (A, B)),
    "logic": (lambda m, i: [m & (i > 0), m | (i > 0), m ^ (i > 0), ~m], (MASK, INTS)),
    "logical": (lambda m, i: [m.logical_and(i), m.logical_or(i), i.logical_not(), m.logical_xor(i)], (MASK, INTS)),
    "bits": (lambda i: [i & 3, i | 4, i ^ 1, ~i, i << 2, i >> 1], (INTS,)),
    "bits in place": (lambda m: m.clone().logical_and_(~m), (MASK,)),
    "where": (lambda m, a, b: torch.where(m, a, b), (MASK, A, B)),
    "where with numbers": (lambda m, a: [torch.where(m, a, 0.0), torch.where(m, 1, a)], (MASK, A)),
    "where promoted": (lambda m, a, i: torch.where(m, a, i), (MASK, A, INTS)),
    "where broadcast": (lambda m, a: torch.where(m[:, :1], a, a[0]), (MASK, A)),
    "any, all": (lambda m: [m.any(), m.all(), m.any(dim=1), m.all(dim=0, keepdim=True)], (MASK,)),
    "isin": (lambda i: torch.isin(i, torch.tensor([1, 2, 3], device=i.device)), (INTS,)),
    # types and copies
    "to types": (
        lambda a: [a.to(t) for t in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool)],
        (A,),
    ),
    "to type in place": (lambda a: torch.empty(3, 4, dtype=torch.int64, device=a.device).copy_(a), (A,)),
    "to fp8 and back": (lambda a: a.to(torch.float8_e4m3fn).float(), (A,)),
    "view as another type": (lambda a: a.view(torch.int32), (A,)),
    "contiguous": (lambda a: a.t().contiguous(), (A,)),
    "clone keeps strides": (lambda a: a.t().clone(), (A,)),
    "channels last": (lambda c: c[None].contiguous(memory_format=torch.channels_last), (CUBE,)),
    "copy broadcasts": (lambda a, r: a.clone().copy_(r), (A, ROW)),
    "copy between views": (lambda a: [c := a.clone(), c[:, :2].copy_(a[:, 2:])][0], (A,)),
    "overlapping views shift": (lambda r: [c := r.clone(), c[1:].copy_(c[:-1].clone())][0], (ROW,)),
    # views
    "view, reshape, flatten": (
        lambda c: [c.view(6, 4), c.reshape(-1), c.flatten(1), c.transpose(0, 2).reshape(4, 6)],
        (CUBE,),
    ),
    "permute, movedim": (lambda c: [c.permute(2, 0, 1), c.movedim(0, 1)], (CUBE,)),
    "squeeze, unsqueeze": (lambda a: [a.unsqueeze(1), a[None].squeeze(0)], (A,)),
    "split, chunk, unbind": (lambda w: [*w.split(2), *w.chunk(3, 1), *w.unbind(0)], (WIDE,)),
    "narrow, select, slice": (lambda a: [a.narrow(1, 1, 2), a.select(0, 1), a[1:, :-1], a[-1]], (A,)),
    "diagonal, unfold": (lambda a: [a.diagonal(), a.unfold(1, 2, 1)], (A,)),
    "as_strided": (lambda a: a.as_strided((2, 3), (1, 4), 1), (A,)),
    "expand_as, broadcast_to": (lambda r, a: [r.expand_as(a), r.broadcast_to(2, 4)], (ROW, A)),
    # making tensors
    "zeros, ones, full": (
        lambda a: [
            torch.zeros(3, device=a.device),
            torch.ones(2, 2, dtype=torch.int32, device=a.device),
            torch.full((2,), 7, device=a.device),
        ],
        (A,),
    ),
    "like": (lambda a: [torch.zeros_like(a), torch.ones_like(a, dtype=torch.bool), torch.full_like(a, 3.5)], (A,)),
    "new": (
        lambda a: [a.new_zeros(2), a.new_ones(2, dtype=torch.int64), a.new_full((2,), 1.5), a.new_tensor([1, 2])],
        (A,),
    ),
    "arange": (
        lambda a: [
            torch.arange(5, device=a.device),
            torch.arange(2, 9, 3, device=a.device),
            torch.arange(0, 1, 0.25, device=a.device),
            torch.arange(5, 0, -2, device=a.device),
            torch.arange(0, device=a.device),
        ],
        (A,),
    ),
    "linspace, eye": (lambda a: [torch.linspace(0, 1, 5, device=a.device), torch.eye(3, device=a.device)], (A,)),
    "tensor of a list": (lambda a: torch.tensor([[1, 2], [3, 4]], device=a.device), (A,)),
    "tril, triu": (lambda a: [a.tril(), a.triu(1), torch.ones(4, 4, device=a.device).tril_()], (A,)),
    "fill": (lambda a: [a.clone().fill_(2), a.clone().fill_(torch.tensor(3.0)), a.clone().zero_()], (A,)),
    "fill with a device scalar": (lambda a, s: a.clone().fill_(s), (A, SCALAR)),
    "fill a view": (lambda a: [c := a.clone(), c[:, 1].fill_(5)][0], (A,)),
    "resize": (lambda a: a.clone().resize_(2, 3), (A,)),
    # putting together and apart
    "cat": (lambda a, b: [torch.cat((a, b)), torch.cat((a, b), 1), torch.cat((a, b.double()))], (A, B)),
    "cat with nothing": (lambda a, e: torch.cat((e, a)), (A, EMPTY)),
    "cat views": (lambda a: torch.cat((a[:, ::2], a[:, 1::2]), -1), (A,)),
    "stack": (lambda a, b: torch.stack((a, b), 1), (A, B)),
    "repeat": (lambda a: a.repeat(2, 3), (A,)),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, dim=0), (A,)),
    "repeat_interleave by tensor": (lambda a, n: a.repeat_interleave(n, dim=0), (A, LONG)),
    "roll, flip": (lambda a: [a.roll(1, 0), a.flip(1), a.roll((1, 2), (0, 1))], (A,)),
    "pad": (lambda a: F.pad(a, (1, 2), value=-1), (A,)),
    # indexing
    "index by rows": (lambda a, i: a[i], (A, indices(3, 5))),
    "index by host rows": (lambda a: a[torch.tensor([2, 0])], (A,)),
    "index by two": (lambda a, i: a[i, i], (A, LONG.clamp(max=2))),
    "index with slices between": (lambda c, i: c[:, i, 1:], (CUBE, indices(3, 2))),
    "index by negative": (lambda a: a[torch.tensor([-1, -2], device=a.device)], (A,)),
    "index by mask": (lambda a, m: a[m], (A, MASK)),
    "index by row mask": (lambda a, m: a[m[:, 0]], (A, MASK)),
    "index by list": (lambda a: a[[0, 2]], (A,)),
    "index by int32": (lambda a, i: a[i], (A, indices(3, 4, dtype=torch.int32))),
    "put by rows": (lambda a, i, b: [c := a.clone(), c.__setitem__(i, b[:2])][0], (A, torch.tensor([2, 0]), B)),
    "put a number by mask": (lambda a, m: [c := a.clone(), c.__setitem__(m, -1.0)][0], (A, MASK)),
    "put into a slice": (lambda a: [c := a.clone(), c.__setitem__(slice(1, 3), 9.0)][0], (A,)),
    "put by host indices": (lambda a: [c := a.clone(), c.__setitem__(torch.tensor([1]), 4.0)][0], (A,)),
    "put adding": (
        lambda a, i: a.clone().index_put_((i,), a.new_ones(4), accumulate=True),
        (A, torch.tensor([0, 0, 2])),
    ),
    "index_select": (
        lambda a, i: [a.index_select(0, i), a.index_select(1, i), a.t().index_select(0, i)],
        (A, torch.tensor([2, 0])),
    ),
    "index_select into out": (
        lambda a, i: torch.index_select(a, 0, i, out=a.new_empty(2, 4)),
        (A, torch.tensor([2, 0])),
    ),
    "index_copy, index_add, index_fill": (
        lambda a, b, i: [a.index_copy(0, i, b[:2]), a.index_add(0, i, b[:2], alpha=2), a.index_fill(1, i, 3.0)],
        (A, B, torch.tensor([2, 0])),
    ),
    "gather": (lambda a, i: a.gather(1, i), (A, indices(4, 3, 2))),
    "scatter": (
        lambda a, i, b: [a.scatter(1, i, b), a.scatter(1, i, 5.0), a.clone().scatter_(0, i % 3, b)],
        (A, indices(4, 3, 2), B),
    ),
    "scatter_add, scatter_reduce": (
        lambda a, i, b: [a.scatter_add(1, i, b), a.scatter_reduce(1, i, b, "amax"), a.clone().scatter_add_(1, i, b)],
        (A, indices(4, 3, 2), B),
    ),
    "take, take_along_dim": (lambda a, i: [a.take(i), a.take_along_dim(i[:, None] % 4, 1)], (A, LONG)),
    "masked_fill": (lambda a, m: [a.masked_fill(m, 7.0), a.clone().masked_fill_(m, -math.inf)], (A, MASK)),
    "masked_fill by tensor": (lambda a, m: a.masked_fill(m, torch.tensor(2.0, device=a.device)), (A, MASK)),
    "masked_scatter": (lambda a, m, b: a.masked_scatter(m, b), (A, MASK, B)),
    "masked_select": (lambda a, m: a.masked_select(m), (A, MASK)),
    "nonzero": (lambda m: [m.nonzero(), *torch.where(m)], (MASK,)),
    "embedding": (lambda w, i: F.embedding(i, w), (WIDE, indices(5, 2, 3))),
    "one_hot": (lambda i: F.one_hot(i, 5), (LONG,)),
    # reductions, order
    "sum, mean": (
        lambda a: [a.sum(), a.mean(), a.sum(0), a.mean(1, keepdim=True), a.sum((0, 1)), a.sum(1, dtype=torch.float64)],
        (A,),
    ),
    "sum of integers and booleans": (lambda i, m: [i.sum(), m.sum(), m.sum(1)], (INTS, MASK)),
    "max, min": (lambda a: [a.max(), a.min(), *a.max(1), *a.min(0, keepdim=True), a.amax(1), a.amin((0, 1))], (A,)),
    "argmax, argmin": (lambda a: [a.argmax(), a.argmax(-1), a.argmin(0, keepdim=True)], (A,)),
    "prod, std, var": (lambda a: [a.prod(), a.prod(1), a.std(), a.var(1), *torch.var_mean(a, 0)], (A,)),
    "norm": (lambda a: [a.norm(), a.norm(dim=1), torch.linalg.vector_norm(a, 1)], (A,)),
    "cumsum, cumprod": (lambda a: [a.cumsum(0), a.cumsum(1), a.cumprod(1), a.clone().cumsum_(0)], (A,)),
    "cummax, logcumsumexp": (lambda a: [*a.cummax(1), a.logcumsumexp(0)], (A,)),
    "count_nonzero, bincount": (
        lambda i: [i.count_nonzero(), i.count_nonzero(1), i.abs().flatten().bincount()],
        (INTS,),
    ),
    "logsumexp": (lambda a: a.logsumexp(-1), (A,)),
    "sort": (lambda a: [*a.sort(), *a.sort(0, descending=True), *a.sort(stable=True, dim=1), a.argsort(1)], (A,)),
    "topk": (lambda a: [*a.topk(2), *a.topk(2, dim=0, largest=False), *a.kthvalue(2)], (A,)),
    "median, unique": (
        lambda i: [i.float().median(), *i.unique(return_inverse=True), i.flatten().unique_consecutive()],
        (INTS,),
    ),
    "searchsorted, bucketize": (
        lambda a: [
            torch.searchsorted(a.sort(1)[0], a),
            torch.bucketize(a, torch.tensor([-1.0, 0.0, 1.0], device=a.device)),
        ],
        (A,),
    ),
    # products
    "matmul": (lambda a, b: [a @ b.t(), a.t() @ b, a @ b[0], a.mv(b[1])], (A, B)),
    "batched matmul": (lambda c: [c @ c.transpose(1, 2), torch.bmm(c, c.transpose(1, 2)), c @ c[0].t()], (CUBE,)),
    "matmul of halves": (lambda h: h @ h.t(), (HALF,)),
    "matmul of nothing": (lambda e, a: e @ a.t(), (EMPTY, A)),
    "addmm, baddbmm": (
        lambda a, b, c: [torch.addmm(a[:, :3], a, b.t(), beta=0.5), torch.baddbmm(c[:, :, :3], c, c.transpose(1, 2))],
        (A, B, CUBE),
    ),
    "linear": (lambda a, b: [F.linear(a, b), F.linear(a, b, b[:, 0])], (A, B)),
    "einsum, outer, dot": (
        lambda a, b: [torch.einsum("ij,kj->ik", a, b), torch.outer(a[0], b[0]), a[0].dot(b[0])],
        (A, B),
    ),
    "attention": (lambda c: F.scaled_dot_product_attention(c, c, c, is_causal=False), (numbers(2, 4, 8, 16),)),
    # layers
    "softmax": (
        lambda a: [a.softmax(-1), a.softmax(0), a.log_softmax(1), a.half().softmax(-1, dtype=torch.float32)],
        (A,),
    ),
    "activations": (
        lambda a: [
            F.silu(a),
            F.gelu(a),
            F.gelu(a, approximate="tanh"),
            F.relu(a),
            F.sigmoid(a),
            F.softplus(a),
            F.hardswish(a),
        ],
        (A,),
    ),
    "more activations": (lambda a: [F.leaky_relu(a), F.elu(a), F.mish(a), F.glu(a)], (A,)),
    "layer_norm": (lambda a, r: [F.layer_norm(a, (4,)), F.layer_norm(a, (4,), r, r + 1)], (A, ROW)),
    "layer_norm mixed": (lambda h, r: F.layer_norm(h, (4,), r, r), (HALF, ROW)),
    "rms_norm": (lambda a, r: F.rms_norm(a, (4,), r), (A, ROW)),
    "group_norm": (lambda c: F.group_norm(c, 3), (CUBE,)),
    "dropout in evaluation": (lambda a: F.dropout(a, 0.5, training=False), (A,)),
    # out=
    "out of the right size": (lambda a, b: torch.add(a, b, out=torch.empty_like(a)), (A, B)),
    "out that is empty": (lambda a, b: torch.mul(a, b, out=a.new_empty(0)), (A, B)),
    "out that is a view": (lambda a, b: [c := a.new_zeros(3, 8), torch.sub(a, b, out=c[:, ::2]), c][2], (A, B)),
    "out that is an input": (lambda a, b: [c := a.clone(), torch.add(c, b, out=c)][0], (A, B)),
    "out of several": (lambda a: list(torch.max(a, 1, out=(a.new_empty(0), a.new_empty(0, dtype=torch.int64)))), (A,)),
    "cumsum into out": (lambda i: torch.cumsum(i, 0, out=torch.empty_like(i)), (INTS,)),
    "logical out": (lambda m: torch.logical_not(m, out=torch.empty(0, dtype=torch.bool, device=m.device)), (MASK,)),
    # several steps
    "chain": (lambda a, b: ((a @ b.t()).softmax(-1) @ b).add_(a).relu().sum(-1).topk(2), (A, B)),
    "foreach": (lambda a, b: torch._foreach_add([a, b], 1.0), (A, B)),
    "equal": (lambda a, b: [torch.equal(a, a.clone()), torch.equal(a, b), torch.allclose(a, a + 1e-9)], (A, B)),
    "read": (lambda a: [a[0, 0].item(), a.tolist(), bool(a.max() > 0), int(a.argmax()), float(a.sum())], (A,)),
    "numpy": (lambda a: a.cpu().numpy().tolist(), (A,)),
}


def flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in flat(item)]
    return [value]


@pytest.mark.parametrize("name", CASES)
def test_same_as_on_the_host(name: str) -> None:
    call, given = CASES[name]
    expected = flat(call(*(one.clone() if isinstance(one, Tensor) else one for one in given)))
    got = flat(call(*(one.to(CARD) if isinstance(one, Tensor) else one for one in given)))
    assert len(got) == len(expected)
    for theirs, ours in zip(expected, got, strict=True):
        if not isinstance(theirs, Tensor):
            assert ours == pytest.approx(theirs, nan_ok=True)
            continue
        assert ours.device == CARD
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_there_are_enough_of_them() -> None:
    assert len(CASES) > 140


RANDOM: dict[str, Call] = {
    "uniform_": lambda t, g: t.uniform_(0, 2, generator=g),
    "normal_": lambda t, g: t.normal_(1, 2, generator=g),
    "exponential_": lambda t, g: t.exponential_(generator=g),
    "random_": lambda t, g: t.random_(0, 100, generator=g),
    "bernoulli_": lambda t, g: t.bernoulli_(0.3, generator=g),
    "rand": lambda t, g: torch.rand(3, 4, device=t.device, generator=g),
    "randn": lambda t, g: torch.randn(3, 4, device=t.device, generator=g),
    "randint": lambda t, g: torch.randint(5, (3, 4), device=t.device, generator=g),
    "randperm": lambda t, g: torch.randperm(20, device=t.device, generator=g),
    "multinomial": lambda t, g: torch.multinomial(t.abs() + 1, 3, generator=g),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_gives_the_same_numbers_as_on_the_host(name: str) -> None:
    results = []
    for where in ("cpu", "bpnpu:0"):
        generator = torch.Generator(device=where).manual_seed(5)
        drawn = [RANDOM[name](torch.zeros(4, 20, device=where), generator).cpu() for _ in range(2)]
        assert not torch.equal(*drawn), "a generator that is used again has moved on"
        results.append(drawn)
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))


def test_the_default_generator_can_be_seeded_saved_and_restored() -> None:
    torch.manual_seed(3)
    first = torch.rand(5, device=CARD)
    state = torch.bpnpu.get_rng_state()
    second = torch.rand(5, device=CARD)
    torch.bpnpu.set_rng_state(state)
    assert torch.equal(second.cpu(), torch.rand(5, device=CARD).cpu())
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(5, device=CARD).cpu())
    with torch.random.fork_rng(devices=[0], device_type="bpnpu"):
        torch.rand(7, device=CARD)
    assert torch.equal(second.cpu(), torch.rand(5, device=CARD).cpu())


def test_mistakes_are_reported_at_the_call() -> None:
    a = torch.zeros(3, 4, device=CARD)
    with pytest.raises(RuntimeError, match="size"):
        a + torch.zeros(5, device=CARD)
    with pytest.raises(RuntimeError, match="shapes"):
        a @ a
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.zeros(3, 4, device="bpnpu:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.where(torch.ones(3, 4, dtype=torch.bool), a, a)
    number = torch.zeros(())
    for written in (
        lambda: number.add_(a[0, 0]),
        lambda: torch.add(a[0, 0], 1, out=number),
        lambda: torch.sum(a, (0, 1), out=number),
        lambda: number.masked_fill_(a[0, 0] == 0, 7.0),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            written()
    assert number.item() == 0
    host = torch.zeros(4)
    with pytest.raises(RuntimeError, match="device"):
        host[torch.tensor([1]).to(CARD)] = torch.ones(1)
    with pytest.raises(RuntimeError, match="generator"):
        a.uniform_(generator=torch.Generator())
    with pytest.raises(IndexError):
        a[5]


def test_filling_with_a_number_of_the_card() -> None:
    three = torch.tensor(3.0).to(CARD)
    assert torch.zeros(()).fill_(three).item() == 3
    assert torch.zeros(2).fill_(three).tolist() == [3, 3]
    assert torch.zeros(2, device=CARD).fill_(three).tolist() == [3, 3]
    assert torch.zeros(2, device="bpnpu:1").fill_(three).tolist() == [3, 3]
    assert torch.zeros(2, device=CARD).fill_(torch.tensor(4.0)).tolist() == [4, 4]
    own = torch.arange(3.0).to(CARD)
    assert own.fill_(own[2]).tolist() == [2, 2, 2]


def test_what_the_card_does_not_have_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"_linalg_det.*forbidden.*BACKPLANE_SIM_FALLBACK"):
        torch.linalg.det(torch.eye(2, device=CARD))
    assert torch.bpnpu.operators()["fell_back"]["aten::_linalg_det.result"] == 1


def test_calls_are_counted_by_operator() -> None:
    torch.bpnpu.reset_operators()
    a = torch.ones(3, device=CARD)
    for _ in range(3):
        a.mul_(2)
    a.nonzero()
    a.sum().item()
    counted = torch.bpnpu.operators()
    assert counted["launched"]["aten::mul.out"] == 3
    assert counted["waited"] == {"aten::nonzero": 1, "aten::_local_scalar_dense": 1}
    assert counted["fell_back"] == {}
    assert "aten::mm.out" in counted["implemented"]
