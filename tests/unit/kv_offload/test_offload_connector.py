"""Checks the registration of the KV offload connector, and which models and options it refuses."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

from vllm_backplane.config.stages import set_kv_offload
from vllm_backplane.errors import BackplaneError, OptionError
from vllm_backplane.kv_offload import connector
from vllm_backplane.kv_offload.metadata import WeightsReport
from vllm_backplane.kv_offload.registration import register
from vllm_backplane.kv_offload.settings import NAME

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=64)


def test_it_can_be_registered_more_than_once() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is connector.BackplaneOffloadConnector


def groups(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_layers_that_attend_to_everything_are_served() -> None:
    assert connector._require_full_attention(groups(FULL)) == 16


@pytest.mark.parametrize("specs", [(WINDOW,), (FULL, WINDOW), (FULL, FULL), ()])
def test_other_layers_are_refused(specs: tuple[Any, ...]) -> None:
    with pytest.raises(BackplaneError, match="remove --kv-transfer-config"):
        connector._require_full_attention(groups(*specs))


@pytest.mark.parametrize(
    "sizes", [{"pipeline_parallel_size": 2}, {"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}]
)
def test_parts_of_a_block_are_refused(sizes: dict[str, int]) -> None:
    one = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    connector._require_one_stage(SimpleNamespace(**one))
    with pytest.raises(BackplaneError, match="remove the option"):
        connector._require_one_stage(SimpleNamespace(**one | sizes))


def test_prompts_that_are_computed_as_a_whole_are_refused() -> None:
    connector._require_prefix_caching(SimpleNamespace(enable_prefix_caching=True))
    with pytest.raises(BackplaneError, match="prefix caching is off"):
        connector._require_prefix_caching(SimpleNamespace(enable_prefix_caching=False))


def test_the_scheduler_learns_of_new_weights() -> None:
    """Tests that reports of two workers reach the scheduler side and its client of the peer."""
    cache = SimpleNamespace(enable_prefix_caching=True)
    sizes = {f"{kind}_parallel_size": 1 for kind in ("pipeline", "decode_context", "prefill_context", "data", "tensor")}
    config = transferring(NAME, capacity="1GiB", peer="127.0.0.1:9000")
    config.parallel_config, config.cache_config = SimpleNamespace(**sizes), cache
    made = connector.BackplaneOffloadConnector(config, KVConnectorRole.SCHEDULER, groups(FULL))
    assert made._peer is not None
    workers = [connector.OffloadHandshakeMetadata(8, identity) for identity in (b"old", b"old of rank 1")]
    made.set_xfer_handshake_metadata(dict(enumerate(workers)))
    known: list[tuple[bytes, int | None]] = []
    for reports in [
        [None, None],
        [WeightsReport(None, b""), WeightsReport(None, b"")],
        [WeightsReport(None, b""), WeightsReport(7, b"")],
        [WeightsReport(7, b"new"), WeightsReport(7, b"")],
    ]:
        outputs = [copy(EMPTY_MODEL_RUNNER_OUTPUT) for _ in reports]
        for output, report in zip(outputs, reports, strict=True):
            output.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=report)
        output = KVOutputAggregator(2).aggregate(outputs)
        assert output is not None
        made.update_connector_output(output.kv_connector_output)
        known.append((made._peer.identity, made._connector_scheduler._weights_since))
    assert known == [(b"old", 0), (b"", None), (b"", None), (b"new", 7)]


def transferring(name: str, **extra: Any) -> Any:
    given = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=given)


def test_what_cannot_be_loaded_is_computed() -> None:
    ours, theirs = transferring(NAME, capacity="1GiB"), transferring("ExampleConnector")
    for config in (ours, theirs, SimpleNamespace(kv_transfer_config=None)):
        set_kv_offload(config)
    assert ours.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert theirs.kv_transfer_config.kv_load_failure_policy == "fail", "settings of another connector must not change"


def test_bad_settings_are_rejected_before_an_engine_starts() -> None:
    with pytest.raises(OptionError, match="lacks 'capacity'"):
        set_kv_offload(transferring(NAME))
