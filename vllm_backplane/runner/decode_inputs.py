"""Writes the inputs of a decode step into the runner's buffers with numpy, which is the decode fast path.

vLLM's runner prepares every step by the rules of the most general one: about sixty PyTorch calls on a few numbers each,
and every buffer twice, for the host and for the device. If each sequence has one token, and the device shares the
host's memory, the same numbers take a few numpy writes. The buffers then hold the same values as after vLLM's own code
(tests/e2e/test_cpu_graphs.py compares them).
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.block_table import SlotMappingMode

from vllm_backplane import ops
from vllm_backplane.guards import guarded


@guarded(
    "vllm.v1.utils:CpuGpuBuffer",
    "vllm.v1.worker.block_table:BlockTable.__init__",
    "vllm.v1.worker.block_table:MultiGroupBlockTable.__init__",
    why="its arrays are read and written directly",
    fast_path="decode steps",
    versions=">=0.32",
)
@guarded(
    "vllm.v1.worker.gpu_input_batch:InputBatch.__init__",
    why="its arrays are read directly",
    fast_path="decode steps",
    versions=">=0.32",
    mentions=(
        "token_ids_cpu",
        "token_ids_cpu_tensor",
        "num_computed_tokens_cpu",
        "num_computed_tokens_cpu_tensor",
        "prev_sampled_token_ids",
        "req_prompt_embeds",
        "block_table",
    ),
)
class DecodeInputs:
    """Prepares the inputs of decode steps for a runner that has loaded its model."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._buffers = {
            name: _host_and_device(getattr(runner, name))
            for name in ("input_ids", "query_start_loc", "query_pos", "req_indices", "num_scheduled_tokens",
                         "discard_request_mask", "num_accepted_tokens")
        }  # fmt: skip
        self._positions = runner.positions.numpy()
        self._lengths = (runner.seq_lens.numpy(), runner.optimistic_seq_lens_cpu.numpy())
        self._computed = runner.num_computed_tokens.numpy()
        self._arange = numpy.arange(runner.max_num_reqs + 1)

    @classmethod
    def create_if_supported(cls, runner: Any) -> DecodeInputs | None:
        """Returns None if a step needs more than these inputs, or if the device does not share the host's memory."""
        if not runner.backplane_device.capabilities.host_memory:
            return None
        unsupported = (
            runner.speculative_config, runner.lora_config, runner.uses_mrope, runner.enable_prompt_embeds,
            runner.use_async_scheduling, runner.num_accepted_tokens_event, runner.is_pooling_model,
            runner.dcp_world_size > 1, runner.parallel_config.use_ubatching,
            runner.cache_config.kv_sharing_fast_prefill,
        )  # fmt: skip
        return None if any(unsupported) else cls(runner)

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._compute_prev_positions",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_cumsum_and_arange",
        "vllm.v1.worker.block_table:BlockTable.compute_slot_mapping",
        "vllm.v1.worker.block_table:BlockTable.commit_block_table",
        "vllm.v1.worker.block_table:MultiGroupBlockTable.compute_slot_mapping",
        "vllm.v1.worker.block_table:MultiGroupBlockTable.commit_block_table",
        why="the buffers of a decode step are written by numpy instead",
        fast_path="decode steps",
        versions=">=0.32",
    )
    def prepare(self, tokens: numpy.ndarray[Any, Any]) -> tuple[slice, None, int] | None:
        """Writes the inputs and returns the result of vLLM's `_prepare_inputs`, or returns None if a sequence has more
        than one token. The result has the rows with logits, no speculative metadata, and the most tokens that a
        sequence samples.

        `tokens` are the scheduled tokens of each sequence. Every row has logits, so their indices are a slice, which
        selects a view instead of a copy.
        """
        runner, batch = self._runner, self._runner.input_batch
        count = batch.num_reqs
        if tokens.sum() != count or tokens.max() != 1 or batch.req_prompt_embeds:
            return None
        if batch.prev_sampled_token_ids is not None or runner._pp_recv_work is not None:
            return None
        tables = batch.block_table.block_tables
        for table in tables:
            table.block_table.gpu.numpy()[:count] = table.block_table.np[:count]
        computed, rows = batch.num_computed_tokens_cpu[:count], self._arange[:count]
        self._write("input_ids", batch.token_ids_cpu[rows, computed])
        self._write("query_pos", 0, count)
        self._write("req_indices", rows)
        self._write("num_scheduled_tokens", 1, count)
        self._write("num_accepted_tokens", 1)
        self._write("query_start_loc", numpy.minimum(self._arange, count))
        for lengths in self._lengths:
            numpy.add(computed, 1, out=lengths[:count])
            lengths[count:] = 0
        self._computed[:count] = computed
        self._positions[:count] = computed
        runner.prev_positions.np[:count] = -1
        total = [runner.requests[name].num_tokens for name in batch.req_ids]
        self._write("discard_request_mask", self._lengths[0][:count] < total)
        for table in tables:
            if table.slot_mapping_mode == SlotMappingMode.TOKEN_TO_KV_SLOT:
                starts, positions = runner.query_start_loc.gpu[: count + 1], runner.positions[:count]
                _write_slot_mapping(table, starts, positions)
        return slice(count), None, 1

    def _write(self, name: str, values: Any, count: int | None = None) -> None:
        """Writes an array, or one value to the first `count` elements, or one value to all, on host and device."""
        end = len(values) if isinstance(values, numpy.ndarray) else count
        for side in self._buffers[name]:
            side[:end] = values


@guarded(
    "vllm.v1.worker.block_table:ComputeSlotMappingKernel.__call__",
    why="an operator gets the same arguments without it",
    fast_path="decode steps",
    versions=">=0.32",
)
def _write_slot_mapping(table: Any, starts: torch.Tensor, positions: torch.Tensor) -> None:
    """Computes the same as `table.compute_slot_mapping` without context parallelism, and pads the rest.

    vLLM's launcher binds a dozen arguments by name, twice, which takes longer than the operator itself.
    """
    blocks, slots = table.block_table.gpu, table.slot_mapping.gpu
    ops.compute_slot_mapping.call(starts, positions, blocks, slots, table.block_size, PAD_SLOT_ID, 1, 0, 1, None)


def _host_and_device(buffer: Any) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    return buffer.np, buffer.gpu.numpy()
