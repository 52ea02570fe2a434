"""Tests the CPU's graphs: a replay gives the results of a call, and a call that cannot be replayed is an error."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_backplane import ops
from vllm_backplane.device.graph import CapturedCalls
from vllm_backplane.devices.cpu import native
from vllm_backplane.devices.cpu.graphs import CpuGraph, live_graph_memories
from vllm_backplane.errors import GraphError

WIDTH = 32
Call = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    assert native.fault() is None, native.fault()
    with torch.inference_mode():
        yield


def numbers(rows: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


WEIGHTS = [numbers(WIDTH, seed) / 5 for seed in range(100, 106)]
ROWS = torch.tensor([2, 0, 3, 3])


def captured(call: Call, x: torch.Tensor) -> tuple[CpuGraph, Any]:
    graph = CpuGraph()
    with graph.capture():
        results = call(x)
    return graph, results


def views(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(-1, 4, WIDTH // 4).transpose(0, 1)
    return (heads[1:3] * 2).reshape(2, -1) + heads.reshape(4, -1)[:2].flip(0)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, ::2] += 1
    y[1:] *= y[:-1].clone()
    y[:, 0] = 0.25
    return y.relu_()


def several(x: torch.Tensor) -> list[torch.Tensor]:
    made = torch._foreach_add([x, x[:2]], 1.5)
    return [*made, *torch.split_with_sizes_copy(x, [10, 22], dim=1), *x.sort(dim=1)]


def types(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = x.to(torch.bfloat16)
    return half, half.float().sum(dim=1, dtype=torch.float64), (x > 0).to(torch.int8), x.argmax(dim=-1)


def masks(x: torch.Tensor) -> torch.Tensor:
    """Computes with temporary memory whose size depends on values; the size of the result does not."""
    return torch.index_put(x, (x > 0.3,), torch.zeros(()).add_(7)) + torch.where(x < 0, x, 2 * x)


def by_reference(x: torch.Tensor) -> torch.Tensor:
    """Calls an operator that is a Python function; the operators inside it are recorded."""
    return ops.embedding.call(x.argmax(dim=1) % 4, x) * 2


def layers(x: torch.Tensor) -> torch.Tensor:
    for weight in WEIGHTS:
        x = x + ops.linear.call(ops.rms_norm.call(x, None, 1e-5, None), weight, None)
    return x


def halves(x: torch.Tensor) -> torch.Tensor:
    """Computes bfloat16 GEMMs. If PyTorch uses oneDNN, they allocate memory that belongs to no tensor."""
    wide = torch.cat([x] * 4, dim=1).repeat(4, 1).bfloat16()
    for weight in WEIGHTS:
        square = weight.repeat(4, 4).bfloat16()
        wide = torch.nn.functional.linear(wide, square) + wide
    return wide


def flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("call", [views, in_place, several, types, masks, by_reference, layers, halves])
def test_replays_give_what_calls_give(call: Call, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        x = numbers()
        graph, results = captured(call, x)
        places = [one.data_ptr() for one in flat(results)]
        for one, expected in zip(flat(results), flat(call(x)), strict=True):
            assert torch.equal(one, expected), "the capture computes"
        for seed in range(1, 5):
            x.copy_(numbers(seed=seed))
            expected = [one.clone() for one in flat(call(x))]
            litter = [torch.full((seed, 40), float("nan")) for seed in range(1, 40)]
            graph.replay()
            del litter
            for one, other in zip(flat(results), expected, strict=True):
                assert torch.equal(one, other)
        assert [one.data_ptr() for one in flat(results)] == places


def test_lists_nothing_and_numbers() -> None:
    x = numbers()

    def call(x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([x, x[ROWS]], dim=0)
        return torch.clamp(ops.rms_norm.call(joined, None, 1e-5, None), min=None, max=0.5)[:, ROWS]

    graph, result = captured(call, x)
    x.copy_(numbers(seed=9))
    graph.replay()
    joined = torch.cat([x, x[ROWS]]).double()
    expected = (joined / (joined.square().mean(-1, keepdim=True) + 1e-5).sqrt()).clamp(max=0.5)[:, ROWS]
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


def test_results_that_share_memory_keep_sharing_it() -> None:
    x = numbers()

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x * 3
        return y, y[1:], x[:2]

    graph, (whole, part, given) = captured(call, x)
    x.fill_(2)
    graph.replay()
    assert bool((whole == 6).all())
    assert part.data_ptr() == whole[1:].data_ptr()
    assert given.data_ptr() == x.data_ptr()


def test_what_was_there_before_is_written_where_it_is() -> None:
    cache, x, slot = torch.zeros(8, WIDTH), numbers(2), torch.tensor([1, 5])

    def call(x: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, slot, x * 2)
        return cache.sum(dim=0)

    graph, total = captured(call, x)
    x.copy_(numbers(2, seed=3))
    slot.copy_(torch.tensor([0, 7]))
    graph.replay()
    assert torch.equal(cache[[0, 7]], numbers(2, seed=3) * 2)
    assert torch.equal(cache[[1, 5]], numbers(2) * 2), "written at the capture, and not again"
    torch.testing.assert_close(total, cache.sum(dim=0))


def test_views_are_not_replayed_and_memory_is_used_again() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = x.view(2, -1).t().t().reshape(-1, WIDTH) + 1
        return x

    x = numbers()
    graph, _ = captured(call, x)
    statistics = graph.statistics()
    assert statistics["operators"] == 100
    assert statistics["views"] >= 300
    assert statistics["bytes"] <= 3 * x.numel() * 4
    graph.replay()
    assert graph.statistics()["copies"] == 0, "results are computed in place, without copies"


def test_a_timed_replay_computes_the_same_and_names_what_it_ran() -> None:
    x = numbers()
    graph, result = captured(lambda x: torch.relu(x @ x.t()), x)
    x.copy_(numbers(seed=4))
    timed = graph.timed_replay()
    assert torch.equal(result, torch.relu(x @ x.t()))
    shape = " ".join(map(str, result.shape))
    assert [name for name, _ in timed] == [f"aten::matmul -> {shape}", f"aten::relu -> {shape}"]
    assert all(0 < seconds < 60 for _, seconds in timed)


def test_memory_goes_with_the_graph_and_what_it_gave() -> None:
    before = live_graph_memories()
    graph, result = captured(layers, numbers())
    assert live_graph_memories() == before + 1
    kept = result[1:].clone()
    del graph
    gc.collect()
    assert live_graph_memories() == before + 1, "a result holds the memory"
    assert torch.equal(result[1:], kept)
    del result
    assert live_graph_memories() == before


def test_a_stale_input_is_rejected() -> None:
    calls = CapturedCalls(CpuGraph)
    x = numbers()
    calls.capture("layers", lambda: layers(x), {"x": x})
    x.copy_(numbers(seed=5))
    assert torch.equal(calls.replay("layers", {"x": x}), layers(x))
    with pytest.raises(GraphError, match="the input x is another tensor"):
        calls.replay("layers", {"x": numbers(seed=6)})


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x.sum().item(), "aten::item returns a value to the host"),
        (lambda x: x.tolist(), "lets Python read a tensor's values"),
        (lambda x: bool(x.any()), "returns a value to the host"),
        (lambda x: torch.equal(x, x), "aten::equal returns a value to the host"),
        (lambda x: x + torch.rand(WIDTH), "aten::rand draws random numbers"),
        (lambda x: torch.nn.functional.dropout(x, 0.5, True), "draws random numbers"),
        (lambda x: x + torch.tensor([1.0] * WIDTH), "aten::lift_fresh makes a tensor from Python values"),
        (lambda x: torch.tensor(1.0).add_(x[0, 0]), "writes into a tensor made from a Python number"),
        (lambda x: x[x > 0], "aten::index.Tensor has a mask"),
        (lambda x: x.nonzero(), "shape depends on values"),
        (lambda x: x.clone().resize_(3), "changes the shape of a tensor in place"),
        (lambda x: torch.empty(WIDTH) + x, "reads a tensor that nothing in the graph has written"),
        (lambda x: x.to("meta") + 1, "aten::"),
        (lambda x: x.to_sparse(), "aten::"),
    ],
)
def test_what_cannot_be_replayed_is_rejected(call: Call, reason: str) -> None:
    with pytest.raises(GraphError, match="cannot be a graph: .*" + reason):
        captured(call, numbers())
    graph, result = captured(layers, numbers())  # the next capture works
    graph.replay()
    assert torch.equal(result, layers(numbers()))


def test_shapes_that_change_with_values_are_rejected() -> None:
    x = numbers()
    try:
        graph, _ = captured(lambda x: [place + 0 for place in torch.where(x > 0)], x)
    except GraphError:
        return
    x.fill_(1)
    with pytest.raises(GraphError, match="at a replay and"):
        graph.replay()


def test_a_refused_call_has_its_results_all_the_same() -> None:
    results: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> None:
        results.append(layers(x) + x.sum().item())

    with pytest.raises(GraphError):
        captured(call, numbers())
    assert torch.equal(results[0], layers(numbers()) + numbers().sum().item())


def test_an_error_inside_is_the_error() -> None:
    graph = CpuGraph()
    with pytest.raises(ZeroDivisionError), graph.capture():
        1 / 0  # noqa: B018
    with pytest.raises(GraphError, match="never captured"):
        graph.replay()
    captured(layers, numbers())


def test_captures_do_not_nest_and_want_no_gradients() -> None:
    with pytest.raises(GraphError, match="another graph"):
        captured(lambda x: captured(layers, x), numbers())
    with torch.inference_mode(False), torch.enable_grad(), pytest.raises(GraphError, match="gradients"):
        captured(layers, numbers())


def test_threads_record_what_is_theirs() -> None:
    """Two threads capture at once, and a third thread allocates and computes all the time."""
    done, stop, both = {}, threading.Event(), threading.Barrier(2)

    def noise() -> None:
        while not stop.is_set():
            torch.ones(WIDTH).mul_(3).sum()

    def work(seed: int) -> None:
        with torch.inference_mode():
            x = numbers(seed=seed)
            graph = CpuGraph()
            with graph.capture():
                y = x * seed
                both.wait(30)
                y = layers(y)
                both.wait(30)
            x.add_(1)
            graph.replay()
            done[seed] = torch.equal(y, layers((numbers(seed=seed) + 1) * seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (2, 3)]
    noisy = threading.Thread(target=noise)
    noisy.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    noisy.join(60)
    assert done == {2: True, 3: True}
