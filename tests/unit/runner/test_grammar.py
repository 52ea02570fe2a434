"""Tests that masks of structured output give the same logits with Backplane's operator as with vLLM's code."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy
import pytest
import torch
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from vllm_backplane import ops
from vllm_backplane.runner.grammar import masks_on_device

VOCABULARY = 1000
BATCH = ["first", "free", "second", "third"]


def masks(rows: int) -> numpy.ndarray:
    words = -(-VOCABULARY // 32)
    return numpy.random.default_rng(1).integers(-(1 << 31), 1 << 31, (rows, words)).astype(numpy.int32)


HAS_BLOCKS = "mask_stride" in inspect.getsource(apply_grammar_bitmask)
"""Whether vLLM's scheduler gives every request as many rows as a request can have: since 0.33."""


@pytest.mark.parametrize(
    ("masked", "drafts"),
    [
        pytest.param(["third", "first"], {}, id="in another order than the batch"),
        pytest.param(["first", "free", "second", "third"], {}, id="all of the batch"),
        pytest.param(["second", "first"], {"first": [5, 6], "free": [7], "second": [8]}, id="with drafts"),
        pytest.param(["gone", "third"], {"gone": [4]}, id="of a request that is not in the batch"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_vllm_does(masked: list[str], drafts: dict[str, list[int]], dtype: torch.dtype) -> None:
    counts = [1 + len(drafts.get(name, ())) for name in masked]
    given = masks(max(counts) * len(masked) if HAS_BLOCKS else sum(counts))
    rows = sum(1 + len(drafts.get(name, ())) for name in BATCH)
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(2)).to(dtype)
    grammar = SimpleNamespace(grammar_bitmask=given, structured_output_request_ids=masked)
    upstream, ours = logits.clone(), logits.clone()
    step = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    apply_grammar_bitmask(step, grammar, SimpleNamespace(req_ids=BATCH), upstream)  # type: ignore[arg-type]
    ops.allowed_tokens_mask(ours, masks_on_device(ours.device, grammar, BATCH, drafts))  # type: ignore[arg-type]
    assert torch.equal(ours, upstream)
    assert torch.isinf(ours).any() and torch.isfinite(ours).any()
