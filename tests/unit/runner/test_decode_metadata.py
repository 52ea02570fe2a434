"""Tests that the metadata of decode steps is cached only where it stays the same, and that padding is always written.

tests/e2e/test_cpu_graphs.py compares the metadata with vLLM's own, step by step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from vllm_backplane.attention.metadata import BackplaneMetadataBuilder
from vllm_backplane.runner import decode_inputs
from vllm_backplane.runner.decode_metadata import DecodeMetadataCache


class Another(BackplaneMetadataBuilder):
    """The metadata builder of a vendor, whose fields are unknown."""


class Table:
    def __init__(self) -> None:
        self.slot_mapping = SimpleNamespace(gpu=torch.full((8,), 77))
        self.rows = torch.full((8, 3), 77)

    def get_device_tensor(self, count: int) -> torch.Tensor:
        return self.rows[:count]


def batch() -> Any:
    return SimpleNamespace(block_table=SimpleNamespace(block_tables=[Table(), Table()]))


def group(builder: type = BackplaneMetadataBuilder, kernel_block_size: int | None = None) -> Any:
    made = builder.__new__(builder)
    return SimpleNamespace(get_metadata_builder=lambda: made, kernel_block_size=kernel_block_size)


def caches(spec: Any = None) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


def runner(**changes: Any) -> Any:
    given = {
        "input_batch": batch(),
        "kv_cache_config": caches(),
        "attn_groups": [[group()]],
        "is_mm_prefix_lm": False,
        "parallel_config": SimpleNamespace(data_parallel_size=1),
        "vllm_config": SimpleNamespace(observability_config=SimpleNamespace(cudagraph_metrics=False)),
    }
    return SimpleNamespace(**(given | changes))


def sizes(count: int, padded: int | None = None) -> dict[str, Any]:
    return {
        "num_reqs": count,
        "num_reqs_padded": padded,
        "num_tokens": count,
        "num_tokens_padded": padded,
        "num_tokens_unpadded": count,
        "num_encoder_reqs": 0,
    }


def results(metadata: DecodeMetadataCache, count: int = 2, padded: int = 4) -> list[object]:
    """Returns the three results that a step requests."""
    given = sizes(count, padded)
    return [metadata.mode(object, given), metadata.slots(object, given), metadata.attention(object, given)]


def is_cached(before: list[object], after: list[object]) -> list[bool]:
    return [one is other for one, other in zip(before, after, strict=True)]


def test_as_many_sequences_are_told_the_same() -> None:
    metadata = DecodeMetadataCache(runner())
    first, other = results(metadata), results(metadata, 3)
    assert is_cached(first, results(metadata)) == [True] * 3
    assert is_cached(first, other) == [False] * 3
    assert is_cached(first[1:], results(metadata, 2, 8)[1:]) == [False] * 2


def test_padding_is_written_every_time() -> None:
    """An earlier, larger step may have left values there; the first time vLLM itself writes the padding."""
    given = runner()
    metadata = DecodeMetadataCache(given)
    results(metadata)
    tables = given.input_batch.block_table.block_tables
    assert all((table.rows == 77).all() for table in tables)
    results(metadata)
    for table in tables:
        assert table.slot_mapping.gpu.tolist() == [77, 77, -1, -1, 77, 77, 77, 77]
        assert table.rows[:, 0].tolist() == [77, 77, 0, 0, 77, 77, 77, 77]


def test_a_step_without_padding_writes_nothing() -> None:
    given = runner()
    metadata = DecodeMetadataCache(given)
    for _ in range(2):
        metadata.attention(object, sizes(3))
        metadata.slots(object, sizes(3, 3))
    assert all((table.rows == 77).all() for table in given.input_batch.block_table.block_tables)


@pytest.mark.parametrize("part", ["input_batch", "kv_cache_config"])
def test_with_other_buffers_everything_is_made_again(part: str) -> None:
    given = runner()
    metadata = DecodeMetadataCache(given)
    first = results(metadata)
    setattr(given, part, batch() if part == "input_batch" else caches())
    assert is_cached(first, results(metadata)) == [False] * 3


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"attn_groups": [[group()], [group(Another)]]}, id="another builder"),
        pytest.param({"attn_groups": [[group(kernel_block_size=16)]]}, id="tables that are computed"),
        pytest.param(
            {"kv_cache_config": caches(CrossAttentionSpec.__new__(CrossAttentionSpec))}, id="attention to an encoder"
        ),
        pytest.param({"is_mm_prefix_lm": True}, id="ranges of pictures"),
        pytest.param(
            {"vllm_config": SimpleNamespace(observability_config=SimpleNamespace(cudagraph_metrics=True))}, id="metrics"
        ),
    ],
)
def test_what_may_change_is_made_every_time(changes: dict[str, Any]) -> None:
    metadata = DecodeMetadataCache(runner(**changes))
    assert is_cached(results(metadata), results(metadata)) == [False] * 3


def test_with_several_replicas_each_step_decides_with_the_others() -> None:
    metadata = DecodeMetadataCache(runner(parallel_config=SimpleNamespace(data_parallel_size=2)))
    assert is_cached(results(metadata), results(metadata)) == [False, True, True]


@pytest.mark.parametrize("part", ["use_ubatching", "kv_sharing_fast_prefill"])
def test_steps_that_need_more_are_left_to_vllm(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = ("speculative_config", "lora_config", "num_accepted_tokens_event")
    flags = ("uses_mrope", "enable_prompt_embeds", "use_async_scheduling", "is_pooling_model")
    given = SimpleNamespace(
        **dict.fromkeys(nothing),
        **dict.fromkeys(flags, False),
        dcp_world_size=1,
        accelerator=SimpleNamespace(capabilities=SimpleNamespace(host_memory=True)),
        parallel_config=SimpleNamespace(use_ubatching=False),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
    )
    monkeypatch.setattr(decode_inputs.compat, "has_known_decode_inputs", lambda: True)
    monkeypatch.setattr(decode_inputs.DecodeInputs, "__init__", lambda self, runner: None)
    assert decode_inputs.DecodeInputs.create_if_supported(given) is not None
    setattr(given.parallel_config if part == "use_ubatching" else given.cache_config, part, True)
    assert decode_inputs.DecodeInputs.create_if_supported(given) is None
