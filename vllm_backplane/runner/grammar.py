"""Masks of structured output for a device of its own memory, where an operator applies them.

vLLM's scheduler makes them, 32 tokens to a number, and its runner hands them to xgrammar. That has kernels for the host
and for CUDA; for every other device it would have one compiled by inductor, which has no code generator for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.core.sched.output import GrammarOutput

_EVERY_TOKEN = -1


def rows_of_masks(
    masks: numpy.ndarray, masked: Sequence[str], batch: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> numpy.ndarray:
    """A mask for every row of logits. A request has a row for each of its draft tokens and one more; `masks` has those
    of the requests `masked`, in their order, and the rows of logits are in the order of `batch`."""
    rows = {request: 1 + len(drafts.get(request, ())) for request in batch}
    first = dict(zip(batch, numpy.cumsum([0, *rows.values()]).tolist(), strict=False))
    result = numpy.full((sum(rows.values()), masks.shape[1]), _EVERY_TOKEN, dtype=numpy.int32)
    place = 0
    for request in masked:
        count = 1 + len(drafts.get(request, ()))
        if request in first:
            result[first[request] : first[request] + count] = masks[place : place + count]
        place += count
    return result


def masks_on(
    device: torch.device, grammar: GrammarOutput, batch: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> torch.Tensor:
    """What the grammars allow, for every row of logits, where the logits are."""
    masks = rows_of_masks(grammar.grammar_bitmask, grammar.structured_output_request_ids, batch, drafts)
    staged = torch.from_numpy(masks)
    if current_platform.is_pin_memory_available():
        staged = staged.pin_memory()  # a copy from other memory would wait for all that the device has to do
    return staged.to(device, non_blocking=True)
