"""The inputs of a decode step, written into the runner's buffers in one go.

vLLM's runner prepares every step by the rules of the most general one: some sixty calls of PyTorch on a few numbers
each, and every buffer twice, for the host and for the device. Where each sequence has one token, and the device's
memory is the host's, the same numbers are a few writes of numpy. What this leaves in the buffers is what vLLM's own way
leaves there (tests/e2e/test_cpu_graphs.py compares them).
"""

from __future__ import annotations

from typing import Any

import numpy
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.block_table import SlotMappingMode

from vllm_backplane.runner import triton_kernels
from vllm_backplane.settings import compat


class DecodeInputs:
    def __init__(self, runner: Any) -> None:
        """A runner that has loaded its model."""
        self._runner = runner
        self._everything = {
            name: _both_sides(getattr(runner, name))
            for name in ("input_ids", "query_start_loc", "query_pos", "req_indices", "num_scheduled_tokens",
                         "discard_request_mask", "num_accepted_tokens")
        }  # fmt: skip
        self._positions = runner.positions.numpy()
        self._lengths = (runner.seq_lens.numpy(), runner.optimistic_seq_lens_cpu.numpy())
        self._computed = runner.num_computed_tokens.numpy()
        self._counting = numpy.arange(runner.max_num_reqs + 1)

    @classmethod
    def of(cls, runner: Any) -> DecodeInputs | None:
        """Nothing where a step needs more than these inputs, or the device has memory of its own."""
        if not (compat.has_known_decode_inputs() and runner.accelerator.capabilities.host_memory):
            return None
        more = (
            runner.speculative_config, runner.lora_config, runner.uses_mrope, runner.enable_prompt_embeds,
            runner.use_async_scheduling, runner.num_accepted_tokens_event, runner.is_pooling_model,
            runner.dcp_world_size > 1, runner.parallel_config.use_ubatching,
            runner.cache_config.kv_sharing_fast_prefill,
        )  # fmt: skip
        return None if any(more) else cls(runner)

    def prepare(self, tokens: numpy.ndarray[Any, Any]) -> tuple[slice, None, int] | None:
        """What `_prepare_inputs` returns, or nothing where a sequence has more than one token. `tokens` of each. The
        rows that have logits are all, so that they are a view rather than a copy."""
        runner, batch = self._runner, self._runner.input_batch
        count = batch.num_reqs
        if tokens.sum() != count or tokens.max() != 1 or batch.req_prompt_embeds:
            return None
        if batch.prev_sampled_token_ids is not None or runner._pp_recv_work is not None:
            return None
        tables = batch.block_table.block_tables
        for table in tables:
            table.block_table.gpu.numpy()[:count] = table.block_table.np[:count]
        computed, rows = batch.num_computed_tokens_cpu[:count], self._counting[:count]
        self._write("input_ids", batch.token_ids_cpu[rows, computed])
        self._write("query_pos", 0, count)
        self._write("req_indices", rows)
        self._write("num_scheduled_tokens", 1, count)
        self._write("num_accepted_tokens", 1)
        self._write("query_start_loc", numpy.minimum(self._counting, count))
        for lengths in self._lengths:
            numpy.add(computed, 1, out=lengths[:count])
            lengths[count:] = 0
        self._computed[:count] = computed
        self._positions[:count] = computed
        runner.prev_positions.np[:count] = -1
        known = [runner.requests[name].num_tokens for name in batch.req_ids]
        self._write("discard_request_mask", self._lengths[0][:count] < known)
        for table in tables:
            if table.slot_mapping_mode == SlotMappingMode.TOKEN_TO_KV_SLOT:
                starts, positions = runner.query_start_loc.gpu[: count + 1], runner.positions[:count]
                triton_kernels.write_slots(table, starts, positions, PAD_SLOT_ID)
        return slice(count), None, 1

    def _write(self, name: str, values: Any, count: int | None = None) -> None:
        """To as many as there are values, or to `count`, or to all."""
        end = len(values) if isinstance(values, numpy.ndarray) else count
        for side in self._everything[name]:
            side[:end] = values


def _both_sides(buffer: Any) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    return buffer.np, buffer.gpu.numpy()
