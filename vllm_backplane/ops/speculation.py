"""Declares the operators that prepare the inputs of a draft model from the outputs of the target model.

Each of them is one small kernel on a device that implements it: batches are ragged, sizes stay on the device,
and nothing waits for the host. They write into given buffers, which a captured graph may use; elements past the
written part do not change.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.ops.operator import FLOAT32, FLOAT32_EXACT, Sample, SampleSpace, nothing, operator
from vllm_backplane.ops.slot_mapping import request_of_token


def _buffer(space: SampleSpace, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full((size,), 1 if dtype is torch.bool else 7, dtype=dtype).to(space.device)


def _keep_rest(out: torch.Tensor, written: torch.Tensor, values: torch.Tensor) -> None:
    """Sets out[:n] = values where `written` is true; other elements do not change."""
    head = out[: values.shape[0]]
    head.copy_(torch.where(written, values.to(out.dtype), head))


def _step_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, positions, padded in (
        ("one request", [3], 1),
        ("padded batch", [0, 7, 11], 5),
        ("at the model's length", [30, 31, 29], 3),
        ("no request", [], 2),
    ):
        yield Sample(
            label,
            (
                space.tensor(positions, torch.int64),
                space.integers(50, len(positions) + 1, 8, dtype=torch.int32),
                space.tensor([p + 1 for p in positions], torch.int32),
                _buffer(space, len(positions), torch.int64),
                _buffer(space, padded, torch.int64),
                4,
                32,
                -1,
            ),
        )


@operator(
    "(Tensor positions, Tensor block_table, Tensor(a!) seq_lens, Tensor(b!) out_positions,"
    " Tensor(c!) out_slot_mapping, int block_size, int max_model_len, int pad_slot) -> ()",
    samples=_step_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def eagle_step_slot_mapping_metadata(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    block_size: int,
    max_model_len: int,
    pad_slot: int,
) -> None:
    """Advances each request by one draft token: its position, its cache slot and its sequence length.

    A request at the model's maximum length continues at position 0 with length 1 and the pad slot: its draft
    tokens are not used and must not be stored. `out_positions` may be `positions`. Slots past the batch are
    padding.
    """
    batch = positions.shape[0]
    advanced = positions.to(torch.int64) + 1
    too_long = advanced >= max_model_len
    advanced = torch.where(too_long, 0, advanced)
    columns = (advanced // block_size).clamp(max=block_table.shape[1] - 1)
    blocks = block_table[:batch].gather(1, columns.unsqueeze(1)).squeeze(1).to(torch.int64)
    slots = blocks * block_size + advanced % block_size
    lengths = seq_lens[:batch]
    lengths.copy_(torch.where(too_long, 1, lengths + 1).clamp(max=max_model_len))
    out_positions[:batch] = advanced.to(out_positions.dtype)
    out_slot_mapping[:batch] = torch.where(too_long, pad_slot, slots).to(out_slot_mapping.dtype)
    out_slot_mapping[batch:].fill_(pad_slot)


def _prepare_inputs_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, drafts, valid in (
        ("all accepted", [3, 2], [4, 3]),
        ("all rejected", [3, 2], [1, 1]),
        ("request without drafts", [2, 0, 1], [2, 1, 2]),
        ("no request", [], []),
    ):
        ends = torch.tensor(drafts, dtype=torch.int64).cumsum(0)
        starts = torch.tensor([0, *(d + 1 for d in drafts)], dtype=torch.int64).cumsum(0)
        yield Sample(
            label,
            (
                ends.to(torch.int32).to(space.device),
                space.tensor(valid, torch.int32),
                starts.to(torch.int32).to(space.device),
                _buffer(space, len(drafts)),
                _buffer(space, len(drafts)),
            ),
        )


@operator(
    "(Tensor cu_num_draft_tokens, Tensor valid_count, Tensor query_start_loc, Tensor(a!) out_sample_index,"
    " Tensor(b!) out_num_rejected) -> ()",
    samples=_prepare_inputs_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: torch.Tensor,
    valid_count: torch.Tensor,
    query_start_loc: torch.Tensor,
    out_sample_index: torch.Tensor,
    out_num_rejected: torch.Tensor,
) -> None:
    """Writes the number of rejected draft tokens of each request, and the index of its last token not rejected.

    cu_num_draft_tokens [requests] is the inclusive cumulative sum; valid_count is the number of accepted draft
    tokens plus one.
    """
    drafts = torch.diff(cu_num_draft_tokens, prepend=torch.zeros_like(cu_num_draft_tokens[:1]))
    rejected = torch.where(drafts > 0, drafts + 1 - valid_count, 0)
    last = query_start_loc[1 : drafts.shape[0] + 1] - 1
    out_sample_index.copy_(last - rejected)
    out_num_rejected.copy_(rejected)


def _next_token_samples(space: SampleSpace) -> Iterator[Sample]:
    sampled = [[5, 6, 7], [5, -1, -1], [-1, -1, -1], [5, 6, -1], [5, 90, -1]]
    for label, rows in (("mixed", sampled), ("one column", [[4], [-1]]), ("no request", [])):
        tokens = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), -1 if rows else 3)
        yield Sample(
            label,
            (
                tokens.to(space.device),
                space.tensor([i == 3 for i in range(len(rows))], torch.bool),
                space.integers(80, len(rows) + 2, dtype=torch.int32),
                _buffer(space, len(rows)),
                _buffer(space, len(rows)),
                80,
            ),
        )


@operator(
    "(Tensor sampled_token_ids, Tensor discard_mask, Tensor backup_token_ids, Tensor(a!) out_next_token_ids,"
    " Tensor(b!) out_valid_count, int vocab_size) -> ()",
    samples=_next_token_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def eagle_prepare_next_token_padded(
    sampled_token_ids: torch.Tensor,
    discard_mask: torch.Tensor,
    backup_token_ids: torch.Tensor,
    out_next_token_ids: torch.Tensor,
    out_valid_count: torch.Tensor,
    vocab_size: int,
) -> None:
    """Writes the last valid sampled token of each request, or its backup token, and how many were valid.

    -1 and ids past the vocabulary are not valid; a discarded request has no valid token.
    """
    requests, width = sampled_token_ids.shape
    valid = (sampled_token_ids != -1) & (sampled_token_ids < vocab_size)
    valid &= ~discard_mask[:requests].unsqueeze(1)
    columns = torch.arange(width, device=sampled_token_ids.device)
    last = torch.where(valid, columns, -1).amax(dim=1)
    chosen = sampled_token_ids.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1)
    backup = backup_token_ids[:requests].to(chosen.dtype)
    out_next_token_ids.copy_(torch.where(last >= 0, chosen, backup))
    out_valid_count.copy_(valid.sum(dim=1))


def _ragged(space: SampleSpace, lengths: list[int]) -> tuple[torch.Tensor, int]:
    start = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return start.to(torch.int32).to(space.device), sum(lengths)


def _expand_eagle_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, lengths, rejected, slots, shift in (
        ("draft model", [4, 1, 3], [1, 0, 2], 1, False),
        ("parallel drafting", [4, 1, 3], [0, 0, 2], 3, True),
        ("parallel drafting without hidden states", [2, 5], [1, 4], 4, False),
        ("one request", [1], [0], 2, True),
        ("no request", [], [], 2, True),
    ):
        start, total = _ragged(space, lengths)
        room = total + slots * len(lengths) + 3
        yield Sample(
            label,
            (
                space.integers(99, total, dtype=torch.int32),
                space.integers(500, total),
                space.integers(99, len(lengths), dtype=torch.int32),
                _buffer(space, room),
                _buffer(space, room, torch.int64),
                _buffer(space, room, torch.bool),
                _buffer(space, room, torch.bool),
                _buffer(space, slots * len(lengths)),
                _buffer(space, total),
                start,
                start[1:] - 1 - space.tensor(rejected, torch.int32),
                0,
                98,
                slots,
                shift,
            ),
        )


@operator(
    "(Tensor target_token_ids, Tensor target_positions, Tensor next_token_ids, Tensor(a!) out_input_ids,"
    " Tensor(b!) out_positions, Tensor(c!) out_is_rejected, Tensor(d!) out_is_masked,"
    " Tensor(e!) out_new_token_indices, Tensor(f!) out_hidden_state_mapping, Tensor query_start_loc,"
    " Tensor query_end_loc, int padding_token_id, int parallel_drafting_token_id, int slots_per_request,"
    " bool shift_input_ids) -> ()",
    samples=_expand_eagle_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def copy_and_expand_eagle_inputs(
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_is_rejected: torch.Tensor,
    out_is_masked: torch.Tensor,
    out_new_token_indices: torch.Tensor,
    out_hidden_state_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    slots_per_request: int,
    shift_input_ids: bool,
) -> None:
    """Writes a draft model's inputs: per request its tokens, the new token, drafting slots, rejected slots.

    query_end_loc [requests] is the index of the last token that was not rejected. `slots_per_request` is the
    number of the new token and the slots for parallel drafting. With `shift_input_ids`, a request's first token
    is left out, and `out_hidden_state_mapping` receives the index to which the hidden state of each input token
    goes; otherwise it is not written. Positions count up from the request's first.
    """
    requests, inputs = query_end_loc.shape[0], target_token_ids.shape[0]
    if requests == 0 or inputs == 0:
        return
    shift = int(shift_input_ids)
    grown = slots_per_request - shift
    index = torch.arange(requests, device=query_start_loc.device)
    begin = query_start_loc[:requests].to(torch.int64)
    kept = query_end_loc.to(torch.int64) - begin + 1 - shift
    out_begin = begin + index * grown
    out_end = query_start_loc[1 : requests + 1].to(torch.int64) + (index + 1) * grown

    outputs = inputs + requests * grown
    request = request_of_token(out_end, outputs)
    owned = request < requests
    request = request.clamp(max=requests - 1)
    offset = torch.arange(outputs, device=begin.device) - out_begin[request]
    past = offset - kept[request]
    source = (begin[request] + shift + offset).clamp(max=inputs - 1)
    first_position = target_positions[begin.clamp(max=inputs - 1)][request]
    drafted = (past > 0) & (past < slots_per_request)
    rejected = past >= slots_per_request

    new_tokens = next_token_ids[request].to(target_token_ids.dtype)
    tokens = torch.where(past == 0, new_tokens, target_token_ids[source])
    tokens = torch.where(drafted, parallel_drafting_token_id, tokens)
    tokens = torch.where(rejected, padding_token_id, tokens)
    _keep_rest(out_input_ids, owned, tokens)
    _keep_rest(out_positions, owned, torch.where(rejected, 0, first_position + offset))
    _keep_rest(out_is_rejected, owned, rejected)
    _keep_rest(out_is_masked, owned, drafted)

    new = (out_begin + kept).unsqueeze(1) + torch.arange(slots_per_request, device=begin.device)
    out_new_token_indices[: new.numel()] = new.flatten().to(out_new_token_indices.dtype)
    if shift_input_ids:
        of_input = request_of_token(query_start_loc[1 : requests + 1], inputs)
        target = torch.arange(inputs, device=begin.device) + of_input * grown
        _keep_rest(out_hidden_state_mapping, of_input < requests, target)


def _expand_dflash_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, lengths, rejected, drafts in (
        ("nothing rejected", [3, 1], None, 2),
        ("padded with rejected tokens", [3, 4], [2, 0], 3),
        ("past the block table", [30], None, 4),
        ("no request", [], None, 2),
    ):
        start, total = _ragged(space, lengths)
        queries = len(lengths) * (drafts + 1)
        yield Sample(
            label,
            (
                space.integers(99, len(lengths), dtype=torch.int32),
                space.tensor([position for length in lengths for position in range(length)], torch.int64),
                _buffer(space, queries + 2),
                _buffer(space, total + 2, torch.int64),
                _buffer(space, queries + 2, torch.int64),
                _buffer(space, total + 2, torch.int64),
                _buffer(space, queries + 2, torch.int64),
                _buffer(space, len(lengths) * drafts),
                space.integers(50, len(lengths) + 1, 8, dtype=torch.int32),
                start,
                None if rejected is None else space.tensor(rejected, torch.int32),
                98,
                4,
                drafts + 1,
            ),
        )


@operator(
    "(Tensor next_token_ids, Tensor target_positions, Tensor(a!) out_input_ids,"
    " Tensor(b!) out_context_positions, Tensor(c!) out_query_positions, Tensor(d!) out_context_slots,"
    " Tensor(e!) out_query_slots, Tensor(f!) out_token_indices, Tensor block_table, Tensor query_start_loc,"
    " Tensor? num_rejected, int parallel_drafting_token_id, int block_size, int queries_per_request) -> ()",
    samples=_expand_dflash_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def copy_and_expand_dflash_inputs(
    next_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_context_positions: torch.Tensor,
    out_query_positions: torch.Tensor,
    out_context_slots: torch.Tensor,
    out_query_slots: torch.Tensor,
    out_token_indices: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor | None,
    parallel_drafting_token_id: int,
    block_size: int,
    queries_per_request: int,
) -> None:
    """Writes the inputs of a block-parallel draft model: context positions and slots, and a request's queries.

    A request's queries are its new token and then mask tokens, at the positions after its last token that
    was not rejected; `out_token_indices` has the indices of the mask tokens. Positions past the block table use
    its last block.
    """
    requests, context = query_start_loc.shape[0] - 1, target_positions.shape[0]
    if requests == 0 or context == 0:
        return
    device = query_start_loc.device

    def slots_of(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        columns = (positions // block_size).clamp(max=block_table.shape[1] - 1)
        return block_table[rows, columns].to(torch.int64) * block_size + positions % block_size

    request = request_of_token(query_start_loc[1:], context)
    owned = request < requests
    _keep_rest(out_context_positions, owned, target_positions)
    _keep_rest(out_context_slots, owned, slots_of(request.clamp(max=requests - 1), target_positions))

    end = query_start_loc[1:].to(torch.int64)
    if num_rejected is not None:
        end = end - num_rejected[:requests]
    last = target_positions[(end - 1).clamp(min=0, max=context - 1)]
    offset = torch.arange(queries_per_request, device=device)
    positions = last.unsqueeze(1) + 1 + offset
    rows = torch.arange(requests, device=device).unsqueeze(1).expand_as(positions)
    tokens = torch.where(offset == 0, next_token_ids[:requests].unsqueeze(1), parallel_drafting_token_id)
    queries = torch.arange(requests * queries_per_request, device=device).view_as(positions)
    masked = queries[:, 1:].flatten()
    total = queries.numel()
    out_query_positions[:total] = positions.flatten().to(out_query_positions.dtype)
    out_query_slots[:total] = slots_of(rows, positions).flatten().to(out_query_slots.dtype)
    out_input_ids[:total] = tokens.flatten().to(out_input_ids.dtype)
    out_token_indices[: masked.numel()] = masked.to(out_token_indices.dtype)
