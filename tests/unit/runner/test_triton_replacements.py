"""Tests vLLM's own call sites of the Triton kernels after the kernels have been replaced by operators."""

from __future__ import annotations

import ctypes
import inspect
import sys
import types

import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode import utils as spec_decode
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.block_table import BlockTable

from vllm_backplane.errors import BindingError, OperatorError
from vllm_backplane.runner import triton_replacements
from vllm_backplane.settings import compat

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _kernels_replaced() -> None:
    triton_replacements.register()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_registering_again_changes_nothing() -> None:
    before = rejection_sampler.expand_kernel
    triton_replacements.register()
    assert rejection_sampler.expand_kernel is before


def test_every_kernel_of_the_list_is_replaced() -> None:
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher", reason="vLLM 0.30 has no dispatcher")
    for name in triton_replacements.REPLACEMENTS:
        host, attribute = dispatcher._resolve_kernel(name)
        kernel = getattr(host, attribute)
        assert isinstance(kernel, dispatcher.KernelOverride), name
        assert kernel._forward_by_name, name


def test_slot_mapping() -> None:
    of_kernels = (4,) if "kernel_block_size" in inspect.signature(BlockTable).parameters else ()  # in vLLM 0.30
    table = BlockTable(4, 3, 8, 12, False, CPU, *of_kernels, 1)
    table.add_row([5, 6, 7], 0)
    table.add_row([9, 2], 1)
    table.block_table.gpu.copy_(table.block_table.cpu)
    table.compute_slot_mapping(2, ints(0, 6, 7), longs(0, 1, 2, 3, 4, 5, 5))
    assert table.slot_mapping.gpu.tolist() == [20, 21, 22, 23, 24, 25, 9, -1, -1, -1, -1, -1]


def test_eagle_step() -> None:
    positions, lengths = longs(2, 9), ints(3, 10)
    out, slots = torch.zeros(2, dtype=torch.int64), torch.full((4,), 7, dtype=torch.int64)
    table = ints(5, 6, 7, 8, 9, 4).view(2, 3)
    spec_decode.eagle_step_update_slot_mapping_and_metadata(positions, table, lengths, 4, 10, out, slots, 4)
    assert out.tolist() == [3, 0]
    assert slots.tolist() == [23, -1, -1, -1]
    assert lengths.tolist() == [4, 1]


def test_eagle_prepare() -> None:
    index, rejected = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    spec_decode._eagle_prepare_inputs_padded(ints(2, 3), ints(1, 2), ints(0, 3, 5), index, rejected, 2)
    assert index.tolist() == [0, 4]
    assert rejected.tolist() == [2, 0]
    sampled = ints(4, 5, -1, 6, -1, -1).view(2, 3)
    following, valid = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    spec_decode._eagle_prepare_next_token_padded(
        sampled,
        torch.tensor([False, True]),
        ints(8, 9, 10),
        following,
        valid,
        50,
        3,
        2,
        3,
        BLOCK_SIZE_TOKENS=4,
    )
    assert following.tolist() == [5, 9]
    assert valid.tolist() == [2, 0]


def test_expanding_for_a_draft_model() -> None:
    ids, positions = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    rejected, masked = torch.zeros(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    new, hidden = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    spec_decode._copy_and_expand_eagle_inputs(
        ints(1, 2, 3), longs(4, 5, 0), ints(8, 9), ids, positions, rejected, masked, new, hidden,
        ints(0, 2, 3), ints(0, 2), 0, 95, 3, 1, False, BLOCK_SIZE_TOKENS=4, batch_size=2, num_blocks=1,
    )  # fmt: skip
    assert ids.tolist()[:5] == [1, 8, 0, 3, 9]
    assert rejected.tolist()[:5] == [False, False, True, False, False]
    assert new.tolist() == [1, 4]


@pytest.mark.parametrize("rejected", [None, 1])
def test_expanding_for_a_block_parallel_draft_model(rejected: int | None) -> None:
    ids, indices = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    queries, query_slots = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    context, context_slots = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    spec_decode._copy_and_expand_dflash_inputs(
        next_token_ids_ptr=ints(50),
        target_positions_ptr=longs(3, 4),
        out_input_ids_ptr=ids,
        out_context_positions_ptr=context,
        out_query_positions_ptr=queries,
        out_context_slot_mapping_ptr=context_slots,
        out_query_slot_mapping_ptr=query_slots,
        out_token_indices_ptr=indices,
        block_table_ptr=ints(5, 6, 7).view(1, 3),
        query_start_loc_ptr=ints(0, 2),
        num_rejected_tokens_ptr=0 if rejected is None else ints(rejected),
        block_table_stride=3,
        parallel_drafting_token_id=95,
        block_size=4,
        num_query_per_req=3,
        num_speculative_tokens=2,
        total_input_tokens=2,
        max_tokens_per_req=5,
        triton_block_size=8,
        has_num_rejected=rejected is not None,
    )
    first = 5 if rejected is None else 4
    assert ids.tolist() == [50, 95, 95]
    assert queries.tolist() == [first, first + 1, first + 2]
    assert query_slots.tolist() == [24 + p - 4 for p in queries.tolist()]
    assert context_slots.tolist() == [23, 24]
    assert indices.tolist() == [1, 2]


def test_expanding_by_request() -> None:
    out = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.0, 0.7]), ints(2, 3), 3, 0, 1)
    assert torch.equal(out, torch.tensor([1.0, 1.0, 0.7]))


def metadata(temperature: list[float], **changes: object) -> SamplingMetadata:
    batch = len(temperature)
    greedy = all(value == 0 for value in temperature)
    values = {
        "temperature": torch.tensor(temperature),
        "all_greedy": greedy,
        "all_random": all(value > 0 for value in temperature),
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(batch),
        "presence_penalties": torch.zeros(batch),
        "repetition_penalties": torch.ones(batch),
        "output_token_ids": [[] for _ in range(batch)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
        "spec_token_ids": None,
    }
    return SamplingMetadata(**(values | changes))


def speculate(drafts: list[list[int]], certain: list[int], temperature: list[float]) -> list[list[int]]:
    """Runs vLLM's whole rejection sampler on logits whose tokens are certain."""
    sampler = Sampler()
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    described = SpecDecodeMetadata.make_dummy(drafts, CPU)
    rows, targets, bonus = 0, [], []
    for row in drafts:
        targets += range(rows, rows + len(row))
        bonus.append(rows + len(row))
        rows += len(row) + 1
    described.target_logits_indices = torch.tensor(targets, dtype=torch.int32)
    described.bonus_logits_indices = torch.tensor(bonus, dtype=torch.int32)
    logits = torch.full((rows, 12), -50.0)
    logits[range(rows), certain] = 50.0
    output = RejectionSampler(sampler)(described, None, logits, metadata(temperature))
    return output.sampled_token_ids.tolist()


@pytest.mark.parametrize("temperature", [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.7]], ids=str)
def test_the_whole_rejection_sampler(temperature: list[float]) -> None:
    drafts = [[1, 2], [3, 9], [4]]
    certain = [1, 2, 5, 3, 7, 6, 8, 2]
    assert speculate(drafts, certain, temperature) == [[1, 2, 5], [3, 7, -1], [8, -1, -1]]


@pytest.mark.parametrize("probabilities", [True, False])
def test_draft_tokens_in_a_column_are_replaced_as_those_in_a_row(probabilities: bool) -> None:
    """Tests that the shape of draft tokens does not matter, because vLLM's kernel counts elements."""
    generator = torch.Generator().manual_seed(3)
    counts, ends = [2, 0, 3], ints(2, 2, 5)
    target = torch.rand(5, 40, generator=generator).softmax(-1)
    draft = torch.rand(5, 40, generator=generator).softmax(-1) if probabilities else None
    tokens = ints(1, 9, 39, 0, 7)
    drawn = []
    for shaped in (tokens, tokens.unsqueeze(1)):
        seeded = metadata([1.0] * 3, generators={place: torch.Generator().manual_seed(place) for place in (0, 2)})
        found = rejection_sampler.sample_recovered_tokens(3, counts, ends, shaped, draft, target, seeded, CPU)
        assert found.shape == shaped.shape
        drawn.append(found.reshape(-1).tolist())
    assert drawn[0] == drawn[1]
    if not probabilities:
        assert all(new != old for new, old in zip(drawn[0], tokens.tolist(), strict=True))


def addresses(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint64)


def test_copying_mamba_states() -> None:
    source, target = torch.arange(6, dtype=torch.float32), torch.zeros(6)
    mamba_utils.batch_memcpy(addresses(source.data_ptr() + 4), addresses(target.data_ptr()), ints(12))
    assert target.tolist() == [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]


def test_copying_several_ranges_in_order() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    mamba_utils.batch_memcpy(
        addresses(source.data_ptr() + 3, source.data_ptr() + 50),
        addresses(target.data_ptr() + 10, target.data_ptr()),
        ints(20, 1),
    )
    wanted = [0] * 100
    wanted[10:30] = range(3, 23)
    wanted[0] = 50
    assert target.tolist() == wanted


@pytest.mark.parametrize("shift", [-3, 3])
def test_copying_overlapping_ranges(shift: int) -> None:
    memory = torch.arange(50, dtype=torch.uint8)
    start = memory.data_ptr() + 10
    mamba_utils.batch_memcpy(addresses(start), addresses(start + shift), ints(30))
    assert memory.tolist()[10 + shift : 40 + shift] == list(range(10, 40))


def test_copying_nothing() -> None:
    mamba_utils.batch_memcpy(addresses(), addresses(), ints())
    mamba_utils.batch_memcpy(addresses(ctypes.addressof(ctypes.c_char())), addresses(0), ints(0))


def test_copying_between_addresses_of_a_device_is_refused() -> None:
    elsewhere = torch.empty(1, dtype=torch.uint64, device="meta")
    with pytest.raises(OperatorError, match="no-enable-prefix-caching"):
        mamba_utils.batch_memcpy(elsewhere, elsewhere, torch.empty(1, dtype=torch.int32, device="meta"))


def test_a_kernel_that_is_gone_is_named() -> None:
    with pytest.raises(BindingError, match=r"rejection_sampler\.gone_kernel does not exist"):
        triton_replacements.launcher("vllm.v1.sample.rejection_sampler.gone_kernel", lambda: None)
    with pytest.raises(BindingError, match=r"vllm\.v1\.nowhere\.kernel does not exist"):
        triton_replacements.launcher("vllm.v1.nowhere.kernel", lambda: None)


def test_an_argument_that_is_gone_is_named() -> None:
    def replacement(*, output_ptr: torch.Tensor, input_pointer: torch.Tensor) -> None:
        raise AssertionError("never launched")

    with pytest.raises(BindingError, match=r"expand_kernel has no argument 'input_pointer'; did you mean 'input_ptr'"):
        triton_replacements.launcher("vllm.v1.sample.rejection_sampler.expand_kernel", replacement)


def test_without_a_dispatcher_kernels_are_replaced_where_modules_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.30 holds kernels by name, in objects that launch them, and as attributes of a class."""

    def kernel(x, y):  # type: ignore[no-untyped-def]
        raise AssertionError("the Triton kernel was launched")

    class Owner:
        pass

    Owner.__module__ = "vllm.old_kernels"
    owner, module, importer = Owner(), types.ModuleType("vllm.old_kernels"), types.ModuleType("vllm.old_importer")
    owner.kernel = kernel  # type: ignore[attr-defined]
    module.some_kernel, module.owner, importer.some_kernel = kernel, owner, kernel  # type: ignore[attr-defined]
    for each in (module, importer):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    launched = []

    def launch(*args, **kwargs):  # type: ignore[no-untyped-def]
        launched.append((args, kwargs))

    launch.arg_names = ("x", "y")  # type: ignore[attr-defined]
    compat.register_kernels({"vllm.old_kernels.some_kernel": launch})
    module.some_kernel[(1,)](1, y=2)  # type: ignore[attr-defined]
    importer.some_kernel[(4, 4)](3, 4)  # type: ignore[attr-defined]
    owner.kernel[(1,)](x=5, y=6)  # type: ignore[attr-defined]
    assert launched == [((1,), {"y": 2}), ((3, 4), {}), ((), {"x": 5, "y": 6})]
    assert owner.kernel.arg_names == ("x", "y")  # type: ignore[attr-defined]


def other_signature(monkeypatch: pytest.MonkeyPatch, arguments: str) -> str:
    """Returns the name of a kernel with the given arguments, as another vLLM might have it."""
    module = types.ModuleType("another_vllm")
    exec(f"def kernel({arguments}): raise AssertionError('replaced')", module.__dict__)
    monkeypatch.setitem(sys.modules, "another_vllm", module)
    return "another_vllm.kernel"


@pytest.mark.parametrize("by_keyword", [True, False])
def test_arguments_are_bound_by_name(monkeypatch: pytest.MonkeyPatch, by_keyword: bool) -> None:
    # The slot-mapping kernel until vLLM 0.31: another order, and a table of smaller blocks.
    names = (
        "num_tokens, max_num_tokens, query_start_loc_ptr, positions_ptr, block_table_ptr, "
        "block_table_stride, block_size, slot_mapping_ptr, KV_CACHE_BLOCK_SIZE, BLOCKS_PER_KV_BLOCK, "
        "TOTAL_CP_WORLD_SIZE, TOTAL_CP_RANK, CP_KV_CACHE_INTERLEAVE_SIZE, PAD_ID, BLOCK_SIZE"
    )
    replacement = triton_replacements.REPLACEMENTS["vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"]
    launch = triton_replacements.launcher(other_signature(monkeypatch, names), replacement)
    out = torch.full((5,), 7, dtype=torch.int64)
    table = ints(10, 11, 20, 21).view(1, 4)
    values = [3, 4, ints(0, 3), longs(1, 2, 4), table, 4, 2, out, 4, 2, 1, 0, 1, -1, 1024]
    if by_keyword:
        launch(**dict(zip(names.split(", "), values, strict=True)))
    else:
        launch(*values)
    assert out.tolist() == [21, 22, 40, -1, 7]
