"""Tests the memory budget of a worker and its error messages."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from vllm_backplane.device import Capabilities, Device, MemoryInfo, Probe
from vllm_backplane.errors import BackplaneError
from vllm_backplane.worker.memory import GIB, PROCESS_RESERVE_BYTES, Budget, extrapolate


class Card(Device):
    name = "card"
    torch_type = "cpu"
    dispatch_key = "CPU"
    capabilities: ClassVar[Capabilities] = Capabilities()
    free = 10 * GIB
    own = 0

    @classmethod
    def probe(cls) -> Probe:
        return Probe(available=True, count=1)

    def memory(self, index: int = 0) -> MemoryInfo:
        return MemoryInfo(total=16 * GIB, free=self.free)

    def own_memory(self, index: int = 0) -> int:
        return self.own


class HostCard(Card):
    capabilities = replace(Card.capabilities, host_memory=True)


def test_the_cache_gets_what_weights_and_activations_leave() -> None:
    card = Card()
    budget = Budget.at_start(card, 0, share=0.5, workers=2)
    assert budget.allowed == 5 * GIB  # cards are not shared, so the second worker takes nothing away
    card.own, card.free = 2 * GIB, 8 * GIB
    assert budget.kv_cache_bytes(None, activations=GIB) == 2 * GIB


class Limited(HostCard):
    """Stands in for a card of a process with a limit of its own."""

    left = 3 * GIB

    def memory(self, index: int = 0) -> MemoryInfo:
        return MemoryInfo(total=16 * GIB, free=self.free, limit="ulimit -v", left_to_process=self.left)


def test_a_limit_of_the_process_is_not_divided_among_workers() -> None:
    card = Limited()
    budget = Budget.at_start(card, 0, share=0.9, workers=2)
    assert budget.allowed == 3 * GIB - PROCESS_RESERVE_BYTES
    card.left = 2 * GIB
    assert budget.kv_cache_bytes(None, activations=GIB // 4) == int(0.9 * (7 * GIB // 4 - PROCESS_RESERVE_BYTES))
    with pytest.raises(BackplaneError, match=r"a KV cache of 2\.00 GiB was requested, and 1\.50 GiB"):
        budget.kv_cache_bytes(2 * GIB, activations=0)


def test_messages_name_the_limit_of_the_process() -> None:
    budget = Budget.at_start(Limited(), 0, share=0.5, workers=1)
    assert "10.00 GiB free, 3.00 GiB within ulimit -v" in budget.describe()
    assert "may take 2.50 GiB, all but 0.50 GiB of what ulimit -v leaves" in budget.describe()
    with pytest.raises(
        BackplaneError, match=r"3\.00 GiB within ulimit -v at start, .*; raise ulimit -v, choose a smaller"
    ):
        budget.refuse_weights(3 * GIB)
    small = Budget.at_start(Limited(), 0, share=0.1, workers=1)  # the share allows less than the limit
    assert "may take 0.10 of that = 1.00 GiB" in small.describe()
    with pytest.raises(BackplaneError, match=r"share 0\.10 of .*; raise BACKPLANE_MEMORY_SHARE, choose"):
        small.refuse_weights(2 * GIB)


def test_workers_that_share_the_host_divide_its_memory() -> None:
    assert Budget.at_start(HostCard(), 0, share=0.5, workers=2).allowed == 5 * GIB // 2


def test_the_cache_never_exceeds_the_share_of_what_is_free_now() -> None:
    card = Card()
    budget = Budget.at_start(card, 0, share=0.5, workers=1)
    card.free = 2 * GIB  # another process took the rest meanwhile
    assert budget.kv_cache_bytes(None, activations=0) == GIB


def test_nothing_left_is_an_error_with_the_numbers() -> None:
    card = Card()
    budget = Budget.at_start(card, 0, share=0.1, workers=1)
    card.own = 2 * GIB
    with pytest.raises(BackplaneError, match=r"1\.00 GiB allowed .*weights took 2\.00 GiB.*BACKPLANE_MEMORY_SHARE"):
        budget.kv_cache_bytes(None, activations=0)


def test_asking_for_more_than_there_is_names_both_numbers() -> None:
    budget = Budget.at_start(Card(), 0, share=0.5, workers=1)
    with pytest.raises(BackplaneError, match=r"20\.00 GiB was requested, and 9\.00 GiB of 16\.00 GiB is free"):
        budget.kv_cache_bytes(20 * GIB, activations=GIB)
    assert budget.kv_cache_bytes(3 * GIB, activations=GIB) == 3 * GIB


def test_the_host_keeps_some_whatever_is_requested() -> None:
    card = HostCard()
    kept = 512 << 20  # which is more than 3 % of 16 GiB
    for share in (0.99, 1.0):
        budget = Budget.at_start(card, 0, share=share, workers=1)
        assert budget.allowed == 10 * GIB - kept
        assert f"{share:.2f} of that, all but 0.50 GiB at most = 9.50 GiB" in budget.describe()
        assert budget.kv_cache_bytes(None, activations=0) <= 10 * GIB - kept
        with pytest.raises(BackplaneError, match=r"10\.00 GiB was requested, and 9\.50 GiB of"):
            budget.kv_cache_bytes(10 * GIB, activations=0)
    assert "at most" not in Budget.at_start(card, 0, share=0.5, workers=1).describe()


def message(fault: pytest.ExceptionInfo[BackplaneError]) -> str:
    return str(fault.value)


@pytest.mark.parametrize("share", [0.97, 1.0])
def test_what_is_reserved_for_the_host_is_reported_and_no_share_would_help(share: float) -> None:
    """Two workers share 10 GiB less 0.5 GiB and get 4.75 GiB each."""
    card = HostCard()
    budget = Budget.at_start(card, 0, share=share, workers=2)
    with pytest.raises(BackplaneError) as fault:
        budget.refuse_weights(5 * GIB)
    terms = "(10.00 GiB free at start less 0.50 GiB reserved for the host / 2 workers)"
    assert f"take 5.00 GiB per worker, and 4.75 GiB may be used on card {terms}; choose a smaller" in message(fault)
    card.own = 5 * GIB
    with pytest.raises(BackplaneError) as fault:
        budget.kv_cache_bytes(None, activations=GIB)
    assert f"4.75 GiB allowed {terms}, weights took 5.00 GiB and a largest step needs 1.00 GiB; lower" in message(fault)


@pytest.mark.parametrize(
    ("expected", "helps"), [(6 * GIB, True), (int(9.5 * GIB), True), (int(9.6 * GIB), False), (20 * GIB, False)]
)
def test_a_larger_share_is_advised_where_it_is_enough(expected: int, helps: bool) -> None:
    card = HostCard()
    budget = Budget.at_start(card, 0, share=0.5, workers=1)
    with pytest.raises(
        BackplaneError, match=r"5\.00 GiB may be used on card \(share 0\.50 of 10\.00 GiB free"
    ) as fault:
        budget.refuse_weights(expected)
    assert ("raise BACKPLANE_MEMORY_SHARE" in message(fault)) == helps
    card.own = expected - GIB // 2
    with pytest.raises(BackplaneError, match=r"5\.00 GiB allowed \(share 0\.50 of 10\.00 GiB free") as fault:
        budget.kv_cache_bytes(None, activations=GIB // 2 - 1)
    assert ("raise BACKPLANE_MEMORY_SHARE" in message(fault)) == helps


def test_what_others_took_meanwhile_is_reported() -> None:
    card = HostCard()
    budget = Budget.at_start(card, 0, share=0.5, workers=1)
    card.free = GIB
    with pytest.raises(BackplaneError, match=r"5\.00 GiB allowed .* and 0\.00 GiB is free beside them now; lower"):
        budget.kv_cache_bytes(None, activations=GIB)


def test_a_card_of_its_own_may_be_filled() -> None:
    assert Budget.at_start(Card(), 0, share=1.0, workers=1).allowed == 10 * GIB


def test_the_option_that_requested_too_much_is_named() -> None:
    budget = Budget.at_start(Card(), 0, share=0.5, workers=1)
    with pytest.raises(BackplaneError, match="lower --num-gpu-blocks-override"):
        budget.kv_cache_bytes(20 * GIB, 0, "--num-gpu-blocks-override")


def test_the_messages_show_share_and_size() -> None:
    budget = Budget.at_start(HostCard(), 0, share=0.5, workers=2)
    assert "0.50 of that / 2 workers = 2.50 GiB" in budget.describe()
    assert budget.describe_kv_cache(GIB, None, GIB // 2).startswith("KV cache: 1.00 GiB; 0.50 GiB are reserved")
    assert "as requested" in budget.describe_kv_cache(GIB, GIB, 0)


@pytest.mark.parametrize(
    ("peaks", "tokens", "expected"),
    [({128: 100, 256: 150}, 512, 250), ({128: 100}, 512, 100), ({128: 150, 256: 140}, 1024, 150)],
)
def test_activations_grow_on_the_measured_line_and_never_shrink(
    peaks: dict[int, int], tokens: int, expected: int
) -> None:
    assert extrapolate(peaks, tokens) == expected
