"""Copies the masks of structured output to a device with its own memory, where an operator applies them.

vLLM's scheduler makes the masks, with 32 tokens per integer, and its runner passes them to xgrammar. xgrammar has
kernels for the host and for CUDA. For every other device it would compile a kernel with inductor, which has no code
generator for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch
from vllm.platforms import current_platform

from vllm_backplane.guards import guarded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.core.sched.output import GrammarOutput

_EVERY_TOKEN = -1


@guarded(
    "vllm.v1.structured_output.utils:apply_grammar_bitmask",
    "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask",
    why="the order of the masks is that of the scheduler, and an operator applies them",
)
def masks_in_batch_order(
    masks: numpy.ndarray, masked: Sequence[str], batch: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> numpy.ndarray:
    """Returns a mask for every row of logits.

    A request has one row for each of its draft tokens and one more. `masks` has the rows of the requests `masked`, in
    their order: until vLLM 0.32 one after another, since 0.33 in blocks of as many rows as a request can have. The rows
    of logits are in the order of `batch`.
    """
    rows = {request: 1 + len(drafts.get(request, ())) for request in batch}
    without_gaps = len(masks) == sum(1 + len(drafts.get(request, ())) for request in masked)
    first = dict(zip(batch, numpy.cumsum([0, *rows.values()]).tolist(), strict=False))
    result = numpy.full((sum(rows.values()), masks.shape[1]), _EVERY_TOKEN, dtype=numpy.int32)
    place = 0
    for request in masked:
        count = 1 + len(drafts.get(request, ()))
        if request in first:
            result[first[request] : first[request] + count] = masks[place : place + count]
        place += count if without_gaps else len(masks) // len(masked)
    return result


def masks_on_device(
    device: torch.device, grammar: GrammarOutput, batch: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> torch.Tensor:
    """Returns the mask of allowed tokens for every row of logits, on the device of the logits."""
    masks = masks_in_batch_order(grammar.grammar_bitmask, grammar.structured_output_request_ids, batch, drafts)
    staged = torch.from_numpy(masks)
    if current_platform.is_pin_memory_available():
        staged = staged.pin_memory()  # a copy from pageable memory would wait for all work queued on the device
    return staged.to(device, non_blocking=True)
